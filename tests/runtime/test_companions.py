"""Compiled modules in the hands of other code, which wraps, copies, compiles, inspects and hooks them."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memplan
from memplan.errors import MemplanError
from tests.steps import assert_same_step


class Scaled(nn.Module):
    """A model with a keyword, a default and a label."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 2.0) -> torch.Tensor:
        out: torch.Tensor = self.last(self.act(self.first(x))) * scale
        return out if labels is None else (out - labels).square().mean()


X = torch.linspace(-1, 1, 32).view(4, 8)
LABELS = torch.linspace(0, 1, 16).view(4, 4)


def _models() -> tuple[nn.Module, nn.Module]:
    """A model to compile, and its copy that stays as it is."""
    torch.manual_seed(0)
    model = Scaled()
    return model, copy.deepcopy(model)


def _require_same_step(called: Callable[..., Any], model: nn.Module, eager: nn.Module, *args: Any) -> None:
    """Fail unless `called` has the result and the gradients of `eager`."""
    names = assert_same_step(model, eager, called, *args)
    assert len(names) == len(list(model.parameters()))


def test_the_signature_and_the_class_name_are_the_originals() -> None:
    model, _ = _models()
    compiled = memplan.compile(model, (X, LABELS))
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert inspect.signature(compiled.__class__.forward).parameters.keys() == {"self", "x", "labels", "scale"}
    assert compiled.__class__.__name__ == "Scaled"
    assert isinstance(compiled, memplan.CompiledModule)
    assert not isinstance(compiled, Scaled)
    assert repr(compiled).startswith("CompiledModule(")


def test_labels_and_columns_are_found_as_transformers_finds_them() -> None:
    generic = pytest.importorskip("transformers.utils.generic")
    model, _ = _models()
    compiled = memplan.compile(model, (X, LABELS))
    assert generic.find_labels(compiled.__class__) == ["labels"]
    assert not generic.can_return_loss(compiled.__class__)

    class MatchesPairs(Scaled):
        def forward(self, x: torch.Tensor, return_loss: bool = True) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)

    assert generic.can_return_loss(memplan.compile(MatchesPairs(), X).__class__)


def test_an_average_of_weights_trains_and_runs_as_in_eager() -> None:
    results = []
    for compiles in (True, False):
        model, _ = _models()
        called = memplan.compile(model, (X, LABELS)) if compiles else model
        averaged = AveragedModel(called, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            called(X, LABELS).backward()
            optimizer.step()
            averaged.update_parameters(called)
        with torch.no_grad():
            results.append((averaged(X, LABELS), *averaged.state_dict().values()))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_data_parallel_inside_and_outside_runs_as_eager() -> None:
    model, eager = _models()
    _require_same_step(nn.DataParallel(memplan.compile(model, X)), model, eager, X)
    model, eager = _models()
    _require_same_step(memplan.compile(nn.DataParallel(model), X), model, eager, X)


@pytest.mark.parametrize("how", ["in place", "torch.compile"])
def test_what_compiles_a_compiled_module_traces_the_original(how: str) -> None:
    model, eager = _models()
    compiled: Any = memplan.compile(model, X)
    if how == "in place":
        compiled.compile(backend="aot_eager")
    else:
        compiled = torch.compile(compiled, backend="aot_eager")
    _require_same_step(compiled, model, eager, X)
    assert "Planned" not in type(compiled(X).grad_fn).__name__


@pytest.mark.parametrize("how", ["in place", "torch.compile", "memplan.compile"])
def test_what_another_compiler_has_compiled_is_planned(how: str) -> None:
    model, eager = _models()
    given = model
    if how == "in place":
        model.compile(backend="aot_eager")
    elif how == "torch.compile":
        given = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        given = memplan.compile(model, X)
    compiled = memplan.compile(given, X)
    _require_same_step(compiled, model, eager, X)
    assert "Planned" in type(compiled(X).grad_fn).__name__


def test_hooks_on_all_modules_are_called_for_the_whole_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = _models()
    compiled = memplan.compile(model, X)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    with caplog.at_level(logging.WARNING, logger="memplan"):
        compiled(X)
        compiled(X)
    handle.remove()
    assert seen == ["Scaled", "Scaled"]
    assert [r.message for r in caplog.records if "hooks on all modules" in r.message] == [caplog.records[-1].message]


def test_a_result_that_is_bound_does_not_hold_the_arena_after_its_backward() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    kept = []
    fake = compiled(X)
    for _ in range(3):
        loss = fake.square().mean()
        model.zero_grad()
        loss.backward()
        kept.append((fake, loss))
        fake = compiled(X)  # while the old one, its graph and its loss are still bound
    expected = eager(X)
    assert all(torch.equal(result, expected) for result, _ in kept)


def test_a_result_is_let_go_when_its_backward_fails() -> None:
    model, eager = _models()
    compiled = memplan.compile(model, X)
    fake = compiled(X)
    with torch.no_grad():
        model.get_parameter("last.weight").mul_(1.0)
    with pytest.raises(MemplanError, match="changed in place"):
        fake.sum().backward()
    _require_same_step(compiled, model, eager, X)
