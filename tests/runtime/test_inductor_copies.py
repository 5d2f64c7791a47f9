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
from tests.runtime.budgets import plan_of_everything
from tests.runtime.late_copies import LateCopies
from tests.runtime.test_inductor_kernels import Block, _tokens
from tests.slow import slow
from tests.steps import same_tensors

# torch's own compilation, which is the reference, imports modules of torch that warn
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Stacked(nn.Module):
    """Convolutions one after another, each with a batch norm, whose statistics the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x)).relu()
        return x.mean()


def _steps(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The results, gradients and buffers of two steps."""
    found = []
    for seed in range(2):
        model.zero_grad()
        torch.manual_seed(seed)
        out = call(x)
        out.square().sum().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found += [out.detach().clone(), *gradients, *(b.clone() for b in model.buffers())]
    return found


def _offloads(plan: Plan) -> int:
    require_no_races(plan)
    found = sum(e.action is Action.OFFLOAD for e in plan.evictions)
    assert follow(plan).copies >= 2 * found > 0  # to the host, and back
    return found


@pytest.mark.parametrize("kind", [slow("attention"), "convolutions"])
def test_everything_goes_to_the_host_and_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs at its wait, and what it overwrites is poisoned when it starts."""
    torch.manual_seed(0)
    model, x = (Block(), _tokens()) if kind == "attention" else (Stacked(), torch.linspace(-1, 1, 512).view(2, 4, 8, 8))
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
    assert same_tensors(_steps(compiled, model, x), _steps(reference, twin, x))
