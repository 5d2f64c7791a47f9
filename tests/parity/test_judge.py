"""The judge and the contest: each kind of fault that a sweep is for is found when it is put in by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import UnsupportedGraph
from tests.parity import catalog, contest, judge, layouts
from tests.parity.cases import Case
from tests.parity.verdicts import Result, Verdict

_NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (torch.tensor([1.0, _NAN]), torch.tensor([1.0, _NAN]), True),
        (torch.tensor([1.0, _NAN]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2, 1), torch.ones(2), False),
        (torch.tensor([1j]), torch.tensor([1j]), True),
        (torch.tensor([1j]), torch.tensor([2j]), False),
        (torch.tensor([1j]).conj(), torch.tensor([-1j]), False),  # 0.0 and -0.0
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j]), True),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
        (torch.tensor([3]), torch.tensor([4]), False),
        (None, None, True),
        (3, 3, True),
        (3, 3.0, False),
    ],
)
def test_same_bits(one: Any, two: Any, same: bool) -> None:
    assert judge.same_bits(one, two) is same


@pytest.mark.parametrize(
    ("one", "two", "close"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), True),
        (torch.tensor([1.0]), torch.tensor([1.01]), False),
        (torch.tensor([1.0, _NAN]), torch.tensor([1.0, _NAN]), True),
        (torch.tensor([1.0, _NAN]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")]), False),
        (torch.tensor([1000.0, 0.001]), torch.tensor([1000.0, 0.002]), True),  # of sums that large
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.01], dtype=torch.bfloat16), True),
        (torch.tensor([2]), torch.tensor([3]), False),
        (1.0, 1.0 + 1e-9, True),
        (1.0, 2.0, False),
    ],
)
def test_close(one: Any, two: Any, close: bool) -> None:
    assert judge.close(one, two) is close


@pytest.mark.parametrize(
    ("layout", "shape", "strides"),
    [
        ("dense", (2, 3), (3, 1)),
        ("transposed", (2, 3), (1, 2)),
        ("expanded", (2, 3), (0, 1)),
        ("window", (2, 3), (1, 1)),
        ("window", (5, 2, 3), (4, 1, 1)),
        ("channels_last", (2, 3, 4, 5), (60, 1, 15, 3)),
    ],
)
def test_layouts(layout: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    made = layouts.laid_out(torch.randn(shape), layout)
    assert made.shape == shape
    assert made.stride() == strides
    assert layouts.overlaps(made) is (layout in layouts.OVERLAPPING)
    again = layouts.laid_out(made, "dense")  # a copy of what overlaps overlaps
    assert again.stride() == strides
    assert again.equal(made)
    assert again.data_ptr() != made.data_ptr()


_CASE = Case(entry="sinh", dtype="float32", sample="largest", form="between", layout="dense")


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operator of our own, so that no test reads torch's databases."""

    def samples(dtype: torch.dtype) -> Any:
        yield catalog.Sample(make=lambda: torch.sinh, args=(torch.randn(4, 5, dtype=dtype),), kwargs={})

    entry = catalog.Entry(name="sinh", dtypes=("float32",), read=samples)
    monkeypatch.setattr("tests.parity.programs.entries", lambda: {"sinh": entry})


def _with(monkeypatch: pytest.MonkeyPatch, run: Callable[[nn.Module], Callable[..., Any]]) -> Verdict:
    monkeypatch.setattr(contest, "_compiled", lambda program, material, *, train: run(program))
    return contest.verdict_on(_CASE)


def test_memplan_passes() -> None:
    assert contest.verdict_on(_CASE).result is Result.PASSED


def _altered(change: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda program: lambda *inputs: [change(x) for x in program(*inputs)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x * 1.01, "result 0 is far from eager's"),
        (lambda x: x * (1 + 2**-22), "result 0 has other bits than aot_eager's"),
        (lambda x: x.detach(), "result 0 has requires_grad False instead of True"),
        (lambda x: x.double(), "result 0 has dtype torch.float64 instead of torch.float32"),
        (lambda x: x.t().contiguous().t(), "result 0 has strides (1, 4) instead of (5, 1)"),
    ],
)
def test_a_wrong_result_is_found(change: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = _with(monkeypatch, _altered(change))
    assert verdict.result is (Result.ROUNDED if "other bits" in reason else Result.WRONG)
    assert reason in verdict.reason


class _Doubled(torch.autograd.Function):
    """The identity, whose gradient is too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = _with(monkeypatch, _altered(_Doubled.apply))
    assert verdict.result is Result.WRONG
    assert "gradient of scale" in verdict.reason


def test_a_result_that_the_next_call_overwrites_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.empty(4, 5)

    class Reused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return kept.copy_(x).view(4, 5)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    verdict = _with(monkeypatch, _altered(Reused.apply))
    assert (verdict.result, verdict.reason.split(": ")[1]) == (Result.WRONG, "result 0 is far from eager's")


def test_errors_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(program: nn.Module) -> Any:
        raise UnsupportedGraph("node", "no kernel at 0x7f12ab for {b, a} of /tmp/some/file.py | yet\nand more", "hint")

    verdict = _with(monkeypatch, typed)
    assert verdict.result is Result.REFUSED
    assert verdict.reason == "UnsupportedGraph: no kernel at 0x... for {...} of ... / yet"

    def untyped(*inputs: Any) -> Any:
        raise KeyError("lost")

    verdict = _with(monkeypatch, lambda program: untyped)
    assert verdict.result is Result.UNTYPED
    assert verdict.reason == "KeyError: 'lost' at no frame of memplan"
