"""Compiling in place, figures, plan files and errors, which the callbacks share."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import memplan
from memplan.core import arguments
from memplan.core.arguments import require_library
from memplan.errors import BudgetInfeasible, LibraryNotInstalled, UnsupportedCall
from memplan.integrations.planned_training import PlannedTraining, compile_in_place

X = torch.linspace(-1, 1, 32).view(4, 8)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def test_a_module_of_torch_itself_is_compiled_in_place() -> None:
    model, backend = _model(), memplan.Backend()
    eager, kind = copy.deepcopy(model), type(model)
    compile_in_place(model, backend)
    result = model(X)
    result.sum().backward()
    eager(X).sum().backward()
    assert len(backend.graphs) == 1
    assert type(model) is kind
    gradients = [[p.grad for p in one.parameters() if p.grad is not None] for one in (model, eager)]
    assert len(gradients[0]) == 4
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_plans_are_logged_and_saved_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    training = PlannedTraining(save_plans=tmp_path / "plans", budget="1GiB")
    training.compile([model])
    training.compile([model])  # training goes on
    assert training.report() == {}
    model(X).sum().backward()
    with caplog.at_level(logging.INFO, logger="memplan"):
        figures = training.report()
        again = training.report()
    assert (
        figures
        == again
        == {
            "memplan/planned_bytes": training.plans[0].total,
            "memplan/arena_bytes": training.backend.arena_size,
            "memplan/graphs": 1,
        }
    )
    assert memplan.load(tmp_path / "plans" / "graph-0.json").total == training.plans[0].total
    assert (tmp_path / "plans" / "largest.html").read_text().startswith("<!doctype html>")
    first, second = (record.message for record in caplog.records if record.name == "memplan")
    assert first.startswith("training runs in one arena of ")
    assert second.startswith("graph 0, Sequential in ")


def test_figures_on_a_gpu_have_the_peaks_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "max_memory_allocated", lambda device: 200, raising=False)
    monkeypatch.setattr(torch.cpu, "max_memory_reserved", lambda device: 300, raising=False)
    model, training = _model(), PlannedTraining(save_plans=None)
    training.compile([model])
    model(X).sum().backward()
    figures = training.report()
    assert (figures["memplan/allocated_bytes"], figures["memplan/reserved_bytes"]) == (200, 300)


def test_a_budget_that_cannot_be_kept_is_refused_at_the_first_step() -> None:
    model = _model()
    PlannedTraining(save_plans=None, budget=1000).compile([model])
    with pytest.raises(BudgetInfeasible):
        model(X)


def test_a_module_with_a_plan_is_refused() -> None:
    compiled = memplan.compile(_model(), X)
    with pytest.raises(UnsupportedCall, match="has its plan already") as caught:
        PlannedTraining(save_plans=None).compile([compiled])
    assert "original model" in (caught.value.hint or "")


def test_a_library_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require_library("torch", where="memplan", install="pip install torch")
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(LibraryNotInstalled, match="needs lightning, which is not installed") as caught:
        require_library("lightning", where="memplan.integrations.lightning", install="pip install lightning")
    assert caught.value.hint == "pip install lightning"
    assert isinstance(caught.value, ImportError)
