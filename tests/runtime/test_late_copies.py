"""Waits that are left out: what the happens-before check says, and what copies that run as late as they may compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from benchmarks.zoo import ZOO
from memplan.core.happens_before import follow, require_no_races
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible
from memplan.planning.options import PlanOptions
from memplan.runtime.memory import arena
from memplan.trace import plan_traced, trace
from memplan.trace.traced import TracedGraph
from tests.models import Layers
from tests.runtime.budgets import FAST_LINK, QUICK, plan_of_everything, runner_of, step_of
from tests.runtime.late_copies import LateCopies, positions_of_copies
from tests.slow import FEW, slow


def _late(monkeypatch: pytest.MonkeyPatch, made: LateCopies) -> None:
    monkeypatch.setattr(arena, "make_copies", lambda *devices: made)


def _plans(traced: TracedGraph) -> Iterator[Plan]:
    yield plan_of_everything(traced)
    options = PlanOptions(arena_budget=0.7, policy=QUICK, costs=FAST_LINK)
    try:
        yield plan_traced(traced, options)
    except BudgetInfeasible:
        return


_EACH = [(name, seed) for name in FEW for seed in (None, 0, 1)]
_QUICK = [("mlp", None), ("mlp", 0), ("lstm", 1)]


@pytest.mark.parametrize(("name", "seed"), [one if one in _QUICK else slow(*one) for one in _EACH])
def test_copies_that_run_late_give_the_same_bits(name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = ZOO[name]("nano")
    before = copy.deepcopy(model.state_dict())  # a step updates the statistics of batch norm
    traced = trace(model, args)
    expected = step_of(runner_of(model, traced, plan_traced(traced)), model, args, 0)
    for plan in _plans(traced):
        copies = LateCopies(seed=seed)
        _late(monkeypatch, copies)
        runner = runner_of(model, traced, plan)
        assert copies.planned, name
        for _ in range(2):
            model.load_state_dict(before)
            assert step_of(runner, model, args, 0).same_as(expected)


def test_a_wait_changes_bits_by_its_absence_exactly_where_the_check_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, args = Layers(), (torch.randn(8, 16),)
    traced = trace(model, args)
    expected = step_of(runner_of(model, traced, plan_traced(traced)), model, args, 0)

    def is_same(plan: Plan, number: int) -> bool:
        _late(monkeypatch, LateCopies(without={number}))
        runner = runner_of(model, traced, plan, sanitize=None)
        return all(step_of(runner, model, args, 0).same_as(expected) for _ in range(2))

    racy = 0
    for plan in _plans(traced):
        require_no_races(plan)
        for number, (_, wait) in enumerate(positions_of_copies(plan)):
            races = bool(follow(plan, without={wait}).races)
            assert races is not is_same(plan, number), plan.graph.ops[plan.schedule.order[wait]].name
            racy += races
    assert racy > 10
