"""Forecasts say what the graph, the placement and the evictions of their plan say."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given

from memplan.analysis.forecast import Forecast, Residence
from memplan.core.evictions import OFFLOAD_WAIT, TRANSFERS, Action
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, MemplanError, UnknownName
from memplan.planning.options import PlanOptions
from memplan.trace import plan_traced
from tests.graph_strategies import plans
from tests.models import traced_nano
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE, plan_of_everything
from tests.slow import slow

_ON_DEVICE = (Residence.ARENA, Residence.OUTSIDE)


@cache
def _evicting(model: str) -> tuple[Plan, ...]:
    traced = traced_nano(model)
    found = [plan_of_everything(traced), plan_of_everything(traced, redzone=64)]
    for policy in (QUICK, QUICK_RECOMPUTE):
        try:
            found.append(plan_traced(traced, PlanOptions(arena_budget=0.7, policy=policy, costs=FAST_LINK)))
        except BudgetInfeasible as error:
            found.append(plan_traced(traced, PlanOptions(arena_budget=error.smallest, policy=policy, costs=FAST_LINK)))
    return tuple(found)


def _check(plan: Plan) -> None:
    """All storages' forecasts against the plan."""
    graph, buffers = plan.graph, {b.id: b for b in plan.problem.buffers}
    copies = {life for _, life in plan.eviction.instances} if plan.eviction else set[int]()
    names = [s.name for i, s in enumerate(graph.storages) if i not in copies and s.kind is not StorageKind.HOST]
    by_life: dict[str, Forecast] = {}
    pairs = zip(graph.values, plan.placed.values, strict=True)
    holder = {one.storage: graph.storages[two.storage].name for one, two in pairs}
    for name in dict.fromkeys(names):
        forecast = plan.forecast(name)
        if plan.schedule.order:
            assert forecast.places[0].start == 0
            assert forecast.places[-1].end == forecast.steps == len(plan.schedule.order)
        assert all(one.end == two.start < two.end for one, two in pairwise(forecast.places))
        assert all(place == forecast.at(step) for place in forecast.places for step in range(place.start, place.end))
        by_life |= dict.fromkeys(forecast.lives, forecast)
        for step in range(-1, forecast.steps):
            assert forecast.next_use(step) == min((s for s in forecast.uses if s > step), default=None)
    for step, index in enumerate(plan.schedule.order):
        for s in graph.touched(graph.ops[index]):
            life = graph.storages[s]
            if graph.ops[index].target in TRANSFERS or life.name not in by_life:  # thrown away at once
                continue
            forecast = by_life[life.name]
            assert step in forecast.uses
            place = forecast.at(step)
            assert place.where in _ON_DEVICE
            if life.planned and life.nbytes:
                buffer = buffers[holder[s]]  # itself, or whose bytes it took
                assert place.offset == plan.solution.offsets[buffer.id] + plan.redzone
                assert buffer.live.is_alive_at_step(step)


@given(plans())
def test_what_an_op_touches_is_there(plan: Plan) -> None:
    _check(plan)


@pytest.mark.parametrize("model", ["mlp", slow("gpt2")])
def test_evicted_is_what_the_plan_evicts(model: str) -> None:
    for plan in _evicting(model):
        _check(plan)
        assert plan.evictions
        gone = 0
        for e in plan.evictions:
            forecast = plan.forecast(e.storage)
            assert plan.forecast(e.instance) == forecast
            assert e.instance in forecast.lives
            assert {e.evicted_access, e.back_access} <= set(forecast.uses)
            away = [p for p in forecast.places if e.evicted_access < p.start and p.end == e.in_trigger]
            back = forecast.at(e.in_trigger)
            assert back.where is (Residence.RETURNING if e.action is Action.OFFLOAD else Residence.ARENA)
            assert forecast.at(e.back_access).where is Residence.ARENA
            for place in away:
                if e.action is Action.RECOMPUTE:
                    assert place.where is Residence.DROPPED
                else:
                    assert place.where is Residence.HOST
                    assert plan.eviction is not None
                    assert place.offset == plan.eviction.host.offsets[f"{e.storage}@host"]
                    waits = plan.graph.ops[plan.schedule.order[place.start - 1]]
                    assert waits.target == OFFLOAD_WAIT
            gone += len(away)
        absences = [
            p
            for name in {e.storage for e in plan.evictions}
            for p in plan.forecast(name).places
            if p.where in (Residence.HOST, Residence.DROPPED)
        ]
        assert len(absences) == gone


def test_names_of_values_and_modules_will_do() -> None:
    plan = _evicting("mlp")[0]
    for value in plan.graph.values:
        assert plan.forecast(value.name).nbytes >= 0
    by_module: dict[str, set[str]] = {}
    for s in plan.graph.storages:
        by_module.setdefault(s.origin.module, set()).add(plan.forecast(s.name).name)
    for module, names in by_module.items():
        if module and len(names) == 1:
            assert plan.forecast(module).name in names
        elif module:
            with pytest.raises(UnknownName, match=f"made {len(names)} storages") as raised:
                plan.forecast(module)
            assert any(name in str(raised.value) for name in names)


def test_errors_say_what_comes_close() -> None:
    plan = _evicting("mlp")[0]
    name = plan.evictions[0].storage
    with pytest.raises(UnknownName, match=f"did you mean: .*{name}"):
        plan.forecast(name + "x")
    with pytest.raises(UnknownName, match=r"plan\.graph\.storages"):
        plan.forecast("?" * 40)
    for step in (-1, len(plan.schedule.order)):
        with pytest.raises(MemplanError, match="is not one of the plan's"):
            plan.forecast(name).at(step)
