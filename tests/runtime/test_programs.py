"""`Programs`: what is kept by kinds of calls, what is given up, and what is remembered."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import CollectiveFailed, MemplanError, UnsupportedGraph
from memplan.runtime import programs
from memplan.runtime.programs import Programs


class _Kind:
    """A kind of call whose hash is computed by Python, as those of tensors are, so that threads may switch in it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return hash(("kind", self.number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self.number == other.number


@contextmanager
def _switching_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_threads_find_add_and_list_programs_at_once() -> None:
    known: Programs[int] = Programs()
    failed: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for turn in range(1500):
                kind = _Kind(4 * thread + turn % 4)
                assert known.of(kind, lambda: thread) == thread
                assert all(isinstance(program, int) for program in known)
                if turn % 50 == 0:
                    known.drop(lambda k: k.number // 4 == thread)
        except BaseException as error:
            failed.append(error)
            raise

    with _switching_often():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not failed


def test_that_which_ran_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Programs[str] = Programs("main")
    monkeypatch.setattr(known, "most", 3, raising=False)
    for kind in "abac":
        known.of(kind, lambda kind=kind: kind)  # type: ignore[misc]
    assert list(known) == ["main", "a", "c"]


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        (UnsupportedGraph("op", "what", "hint"), True),
        (UnsupportedGraph("op", "what", "hint", see="optimizer-state"), False),
        (CollectiveFailed("a rank died", where="step"), False),
    ],
)
def test_only_what_the_kind_decides_is_remembered(error: MemplanError, remembered: bool) -> None:
    known: Programs[str] = Programs()
    for _ in range(2):
        with pytest.raises(type(error)):
            known.of("kind", lambda: _raise(error))
    if remembered:
        with pytest.raises(type(error)):
            known.of("kind", lambda: "made")
    else:
        assert known.of("kind", lambda: "made") == "made"


def _raise(error: MemplanError) -> str:
    raise error


def test_a_refused_kind_that_comes_again_makes_no_other_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST_REFUSED", 2)
    known: Programs[str] = Programs()
    error = UnsupportedGraph("op", "what", "hint")
    for kind in ("a", "b", "b"):
        known.refuse(kind, error)
    with pytest.raises(UnsupportedGraph):
        known.require("a")


def test_one_plan_runs_calls_that_differ_in_strides_or_in_how_arguments_are_passed() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.inner(x) * y).square().mean()
            return loss

    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    example = torch.ones(4, 8), torch.ones(4, 8)
    step = memplan.compile_step(model, optimizer, lambda loss: loss, example)
    x, y = torch.ones(2, 8), torch.ones(2, 8)
    step(x, y)
    made = len(step._builder.plans)
    for args, kwargs in (((torch.ones(8, 2).t(), y), {}), ((), {"x": x, "y": y}), ((), {"y": y, "x": x})):
        step(*example)
        step(*args, **kwargs)
    assert len(step._builder.plans) == made == 2
