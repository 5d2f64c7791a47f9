"""A compiled module whose later mode or shape one graph cannot hold runs such calls as several graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible, UnsupportedGraph
from memplan.runtime.api.module_builder import ModuleBuilder
from tests.models import BreaksInEval
from tests.runtime.reference import same_gradients
from tests.steps import assert_same_step


class BreaksAtOtherSizes(BreaksInEval):
    """Looks at its results where there are many rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x).tanh()
        if x.shape[0] > 8 and hidden.sum() > 0:
            hidden = hidden * 2
        out: torch.Tensor = self.two(hidden)
        return out


def _x(n: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(n))


def _models(kind: type[BreaksInEval]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind()
    return model, copy.deepcopy(model)


def _same_step(one: nn.Module, two: nn.Module, call: Callable[..., Any], x: torch.Tensor) -> None:
    """Train both models for a step, one of them by `call`, and compare losses and gradients bit by bit."""
    assert assert_same_step(one, two, call, x) == dict(one.named_parameters()).keys()


def test_a_mode_that_one_graph_cannot_hold_runs_as_several(caplog: pytest.LogCaptureFixture) -> None:
    model, eager = _models(BreaksInEval)
    compiled = memplan.compile(model, _x(0), sanitize="poison")
    for n in range(2):
        _same_step(model, eager, compiled, _x(n))
        for part in (compiled, eager):
            part.zero_grad()
            part.eval()
        for k in range(2):
            with torch.no_grad():
                assert torch.equal(compiled(_x(k)), eager(_x(k)))
            _same_step(model, eager, compiled, _x(k))  # and with gradients
        for part in (compiled, eager):
            part.train()
    said = [r.message for r in caplog.records if "is planned as several graphs" in r.message]
    assert len(said) == 1
    assert "models.py:" in said[0]


def test_a_shape_that_one_graph_cannot_hold_runs_as_several(caplog: pytest.LogCaptureFixture) -> None:
    model, eager = _models(BreaksAtOtherSizes)
    compiled = memplan.compile(model, _x(0))
    for n, rows in enumerate((6, 9, 9, 6, 5, 9)):
        _same_step(model, eager, compiled, _x(n, rows))
    assert sum("is planned as several graphs" in r.message for r in caplog.records) == 1


def test_a_step_in_flight_keeps_its_arena() -> None:
    model, eager = _models(BreaksInEval)
    compiled = memplan.compile(model, _x(0))
    losses = []
    for part, forward in ((model, compiled), (eager, eager)):
        waiting = forward(_x(0))
        part.eval()
        losses.append(forward(_x(1)).sum() + waiting.sum())
        part.train()
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert same_gradients(model, eager)


def test_a_budget_holds_for_each_in_turn() -> None:
    model, eager = _models(BreaksInEval)
    limit = memplan.plan(model, _x(0)).total + 2624  # each graph has gradients of its results beside it
    compiled = memplan.compile(model, _x(0), budget=limit)
    _same_step(model, eager, compiled, _x(0))
    for part in (compiled, eager):
        part.zero_grad()
        part.eval()
    with torch.no_grad():
        assert torch.equal(compiled(_x(1)), eager(_x(1)))
    waiting = compiled(_x(2)).sum()
    compiled.train()
    with pytest.raises(BudgetInfeasible, match="another call while one waits"):
        compiled(_x(0))
    waiting.backward()
    for part in (compiled, eager):
        part.train()
    _same_step(model, eager, compiled, _x(3))


@pytest.mark.parametrize("options", [{"fullgraph": True}, {"on_mismatch": "error"}])
def test_promises_refuse_such_a_mode(options: dict[str, Any]) -> None:
    model, eager = _models(BreaksInEval)
    compiled = memplan.compile(model, _x(0), **options)
    compiled.eval()
    with torch.no_grad(), pytest.raises(UnsupportedGraph, match="cannot be traced as one graph"):
        compiled(_x(0))
    compiled.train()
    _same_step(model, eager, compiled, _x(0))


def test_a_second_compilation_that_fails_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model, eager = _models(BreaksInEval)
    compiled = memplan.compile(model, _x(0))
    waiting = compiled(_x(0)).sum()

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(ModuleBuilder, "build", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        compiled(_x(1))
    waiting.backward()
    assert compiled._calls.pending is None
    _same_step(model, eager, compiled, _x(2))
    monkeypatch.undo()
    model.zero_grad()
    eager.zero_grad()
    for call in (compiled, eager):
        (call(_x(3)) + call(_x(4))).sum().backward()
    assert same_gradients(model, eager)
