"""Copies to the host beside Inductor's kernels: the bits of `torch.compile`, within the budgets, without races."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.evictions import Action
from memplan.core.happens_before import follow, require_no_races
from memplan.core.plan import Plan
from memplan.runtime.memory import arena
from memplan.trace import capture_call
from tests.models import Made
from tests.runtime.budgets import plan_of_everything
from tests.runtime.late_copies import LateCopies
from tests.runtime.test_inductor_kernels import Block, _tokens
from tests.slow import slow
from tests.steps import Outcome, outcome_of, same_outcomes

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def _stacked() -> Made:
    """Convolutions one after another, each with a batch norm, whose statistics the forward changes."""
    layers = [layer for _ in range(2) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return Made(lambda m, x: m.layers(x).mean(), layers=nn.Sequential(*layers))


def _steps(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[Outcome]:
    return [outcome_of(model, lambda x: call(x).square().sum(), x, seed=seed) for seed in range(2)]


def _offloads(plan: Plan) -> int:
    require_no_races(plan)
    found = sum(e.action is Action.OFFLOAD for e in plan.evictions)
    assert follow(plan).copies >= 2 * found > 0  # to the host, and back
    return found


@pytest.mark.parametrize("kind", [slow("attention"), "convolutions"])
def test_everything_goes_to_the_host_and_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs at its wait, and what it overwrites is poisoned when it starts."""
    torch.manual_seed(0)
    model, x = (
        (Block(), _tokens()) if kind == "attention" else (_stacked(), torch.linspace(-1, 1, 512).view(2, 4, 8, 8))
    )
    twin = copy.deepcopy(model)
    traced = capture_call(model, x, kernels="inductor", copy_gradients=True).first()
    plan = replace(plan_of_everything(traced), code=traced.code)
    assert _offloads(plan) > 2
    monkeypatch.setattr(arena, "make_copies", lambda *_: LateCopies())
    compiled = memplan.compile(
        model, x, plan=plan, kernels="inductor", gradients="outside", sanitize="poison", on_mismatch="error"
    )
    free = memplan.plan(model, x, kernels="inductor", gradients="outside")
    assert compiled.plan.arena_size < free.arena_size
    inductor = plan.code is None or plan.code.layouts
    reference = torch.compile(twin, options=None if inductor else {"layout_optimization": False})
    assert same_outcomes(_steps(compiled, model, x), _steps(reference, twin, x))
