"""Example inputs mean the same for the API, for a FACTORY of the command line, and for `max_batch`."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.cli.source import obtain
from memplan.core.arguments import arguments_of
from memplan.errors import BudgetInfeasible, MemplanError, UnsupportedGraph


class Takes(nn.Module):
    """Takes tensors in every form; what it computes depends on which argument they come as."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, first: Any = None, second: Tensor | None = None, *, scale: Tensor | None = None) -> Tensor:
        parts = [*first] if isinstance(first, list) else [*first.values()] if isinstance(first, dict) else [first]
        out: Tensor = sum(self.inner(x) for x in (*parts, second) if x is not None)
        return out if scale is None else out * scale


def x() -> Tensor:
    return torch.ones(4, 8)


FORMS: dict[str, tuple[Any, ...]] = {
    "tuple": ((x(), x()),),
    "dict": ({"first": x(), "scale": x()},),
    "both": ((x(),), {"scale": x()}),
    "one": (x(),),
    "list": ([x(), x(), x()],),
    "dict_of_its_own": (({"a": x(), "b": x()},),),
    "one_and_keywords": (x(), {"second": x()}),
}
SOURCE = "from tests.core.test_arguments import FORMS, Takes\n" + "\n".join(
    f"def {name}(): return (Takes(), *FORMS[{name!r}])" for name in FORMS
)


@pytest.mark.parametrize("form", FORMS)
def test_a_factory_and_the_api_plan_and_run_the_same_call(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "forms.py").write_text(SOURCE, encoding="utf-8")
    model = Takes()
    planned, named = memplan.plan(model, *FORMS[form]), obtain(f"{tmp_path}/forms.py:{form}")
    assert planned.fingerprint == named.fingerprint
    args, kwargs = arguments_of(*FORMS[form])
    compiled = memplan.compile(model, *FORMS[form], plan=planned)
    assert torch.equal(compiled(*args, **kwargs), model(*args, **kwargs))


def test_a_list_is_one_argument_and_a_tuple_several() -> None:
    assert arguments_of([1, 2]) == (([1, 2],), {})
    with pytest.raises(MemplanError):
        memplan.plan(Takes(), (x(), x(), x()))  # forward takes two
    assert memplan.plan(Takes(), [x(), x(), x()]).arena_size > 0


def test_a_whole_step_takes_its_batch_as_a_dict() -> None:
    model = Takes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"first": x(), "scale": x()}
    step = memplan.compile_step(model, optimizer, lambda out: out.square().mean(), batch)
    expected = model(**batch).square().mean()
    assert torch.equal(step(**batch), expected)


def test_any_mapping_is_keywords() -> None:
    assert arguments_of(MappingProxyType({"x": 1})) == ((), {"x": 1})
    assert arguments_of((), MappingProxyType({"x": 1})) == ((), {"x": 1})
    assert arguments_of(()) == ((), {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((1, 2), "example_kwargs: is a int, not a dict of keywords(.|\n)*as a tuple"),
        (({1: 2},), "example_inputs: has the key 1, which is no name"),
        (((), {1: 2}), "example_kwargs: has the key 1, which is no name"),
    ],
)
def test_keywords_are_named(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(MemplanError, match=message):
        arguments_of(*given)


@pytest.mark.parametrize(
    "error",
    [
        MemplanError("what", where="where", hint="hint"),
        UnsupportedGraph("node", "reason", "hint"),
        BudgetInfeasible("what", op="op", smallest=7),
    ],
)
def test_errors_cross_processes_whole(error: MemplanError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), vars(again), again.args) == (str(error), vars(error), error.args)
