"""The step behind a plan with evictions: the traced graph, in the order of the first runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule
from memplan.errors import BudgetInfeasible, InvalidPlan
from memplan.evict.costs import DEVICES
from memplan.planning.base_graph import without_evictions
from memplan.planning.budget import plan_within
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import PlanOptions
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, graphs, schedules


def _within(graph: Graph, schedule: Schedule, **options: object) -> Plan:
    scheduled = ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=64, versions={})
    return plan_within(scheduled, PlanOptions(**options), DEVICES["cpu"])  # type: ignore[arg-type]


def _dropout(mask: int) -> Graph:
    """Two layers whose masks are larger than a generator's state, and a backward that needs both."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, mask, planned=False)
    masks, saved = [], [x]
    for _ in range(3):
        masks.append(b.storage(StorageKind.ACTIVATION, mask, planned=True))
        saved.append(b.storage(StorageKind.ACTIVATION, mask, planned=True))
        b.op(Phase.FORWARD, (), (masks[-1],), random=True)
        b.op(Phase.FORWARD, (masks[-1], saved[-2]), (saved[-1],))
    gradient = saved[-1]
    for i in reversed(range(3)):
        made = b.storage(StorageKind.GRADIENT, mask, planned=True)
        b.op(Phase.BACKWARD, (gradient, masks[i], saved[i]), (made,))
        gradient = made
    kept = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.BACKWARD, (gradient,), (kept,))
    return b.graph(gradients=(kept,))


@given(
    graphs().flatmap(lambda g: st.tuples(st.just(g), schedules(g))),
    st.sampled_from(["auto", "recompute", "flow"]),
    st.sampled_from(["min", 0.6, 0.8, 1.0]),
)
def test_the_step_is_found_again(step: tuple[Graph, Schedule], policy: str, budget: str | float) -> None:
    graph, schedule = step
    try:
        plan = _within(graph, schedule, arena_budget=budget, policy=policy)
    except BudgetInfeasible:
        return
    found = without_evictions(plan)
    assert found.graph == graph
    assert found.schedule.order in (schedule.order, traced(graph).order)  # that in which checkpoints need less


def test_a_step_that_saves_generator_states_is_found_again() -> None:
    graph = _dropout(1 << 20)
    plan = _within(graph, traced(graph), arena_budget="min", policy="recompute")
    assert any(s.kind is StorageKind.RNG_STATE for s in plan.graph.storages)
    assert len(plan.graph.ops) > len(graph.ops)
    assert without_evictions(plan).graph == graph


def test_a_plan_for_another_device_is_refused() -> None:
    graph = _dropout(1 << 20)
    plan = _within(graph, traced(graph), arena_budget=0.8)
    assert plan.eviction is not None
    with pytest.raises(InvalidPlan, match="between devices"):
        without_evictions(replace(plan, eviction=replace(plan.eviction, device="cuda:0")))
