"""What demanding users do to budgets: every mode of a module, copies of it, plans from files, and odd options."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import InvalidPlan, InvalidSize, PlanMismatch
from memplan.planning.options import PlanOptions
from memplan.planning.planfile import load
from memplan.runtime import CompiledModule
from memplan.runtime import compile as memplan_compile
from memplan.trace import plan_traced, trace
from memplan.trace.batches import max_batch
from tests.models import Made
from tests.runtime.budgets import FAST_LINK, QUICK, plan_of_everything
from tests.slow import slow
from tests.steps import outcome_of


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2))
    return nn.Sequential(*layers), torch.randn(64, 32)


def _arenas(compiled: CompiledModule) -> set[int]:
    """Identities of the arenas in which the module's programs run."""
    return {id(runner.arena) for runner in (compiled._calls.selector.main, *compiled._calls.selector._runners.values())}


def test_other_modes_use_the_room_that_is_there() -> None:
    """A share is of what the step needs: a forward alone needs less, and may have all of the arena."""
    model, x = _net()
    compiled = memplan_compile(model, x, arena_budget=0.5, gradients="outside", policy=QUICK, costs=FAST_LINK)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    model.eval()
    assert torch.equal(compiled(x), model(x))
    assert len(_arenas(compiled)) == 1


def test_other_modes_keep_the_budget_of_a_given_plan() -> None:
    model, x = _net()
    traced = trace(model, x, gradients_in_arena=True)
    plan = plan_traced(traced, PlanOptions(arena_budget="min", policy=QUICK, costs=FAST_LINK))
    compiled = memplan_compile(model, x, plan=plan)
    model.eval()
    compiled(x).sum().backward()
    assert len(_arenas(compiled)) == 1
    model.train()
    twin = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(twin(x), model(x))
    assert twin.plan.arena_size <= plan.arena_size
    assert twin.plan.evictions


def test_results_of_no_bytes_are_copied_too() -> None:
    """Batch norm in eval mode has statistics of no elements."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(4, 4, 8, 8)
    compiled = memplan_compile(
        model, x, train=True, arena_budget=0.8, policy="genoa", costs=FAST_LINK, sanitize="poison"
    )
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("bounds", [{"budget": None}, {"budget": 0.5}, {"budget": 1 << 20, "lowest": 1.5}])
def test_bounds_of_batches_are_whole_numbers(bounds: dict[str, Any]) -> None:
    with pytest.raises(InvalidSize):
        max_batch(lambda batch: (nn.Linear(4, 4), torch.randn(batch, 4)), **bounds)


def test_lives_that_are_not_those_of_the_graph_are_refused(tmp_path: Path) -> None:
    """They decide what a plan says of its evictions."""
    model, x = _net()
    plan = plan_of_everything(trace(model, x))
    assert plan.eviction is not None
    lives = plan.eviction.instances
    for wrong in ((), (*lives, lives[0]), ((lives[1][0], lives[0][1]), *lives[1:])):
        replace(plan, eviction=replace(plan.eviction, instances=wrong)).save(tmp_path / "plan.json")
        with pytest.raises(InvalidPlan, match="instances"):
            load(tmp_path / "plan.json")


def test_a_plan_with_evictions_for_another_model_is_refused_as_such() -> None:
    model, x = _net()
    plan = plan_traced(trace(model, x), PlanOptions(arena_budget=0.6, policy=QUICK, costs=FAST_LINK))
    with pytest.raises(PlanMismatch, match="another graph"):
        memplan_compile(nn.Sequential(*list(model.children())[:1]), x, plan=plan)


def _in_parts(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made[:, :2], made[:, 2:] = x[:, :2] * 2, x[:, 2:].sin()
    return made


@pytest.mark.parametrize(
    "fill",
    [
        slow(lambda x: nn.functional.gumbel_softmax(x, 0.5)),
        lambda x: x + torch.empty_like(x).uniform_(-1, 1),
        slow(_in_parts),
    ],
    ids=["gumbel_softmax", "uniform_", "in parts"],
)
def test_memory_that_was_never_written_begins_where_it_is_first_read(fill: Any) -> None:
    torch.manual_seed(0)
    model = Made(lambda m, x: m.out(fill(m.into(x).tanh())), into=nn.Linear(6, 6), out=nn.Linear(6, 6))
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    compiled = memplan_compile(model, x, arena_budget="min", sanitize="poison")
    one, two = (
        outcome_of(net, lambda x, call=call: call(x).square().mean(), x, seed=1)
        for net, call in ((model, compiled), (eager, eager))
    )
    assert one.same_as(two)
