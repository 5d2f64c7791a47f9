"""Tests of plans that replace one without a budget, which needs more than eager once temporaries are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import DEVICES
from memplan.evict.workload import Policy
from memplan.planning.budget import plan_within
from memplan.planning.eager_total import eager_total
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import AsEager, with_temporaries
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder
from tests.planning.test_budget import SIZE, chain


def _scheduled(graph: Graph) -> ScheduledGraph:
    return ScheduledGraph(model="m", graph=graph, schedule=traced(graph), alignment=64, versions={})


def _saved() -> Graph:
    """A forward whose first and last result the backward reads; the last one takes the place of the second."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    one, two, three = (b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(3))
    gradient = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.FORWARD, (x,), (one,))
    b.op(Phase.FORWARD, (one,), (two,))
    b.op(Phase.FORWARD, (two,), (three,))
    b.op(Phase.BACKWARD, (three, one), (gradient,))
    b.op(Phase.BACKWARD, (x,), (gradient,))
    graph = b.graph(gradients=(gradient,))
    shared = replace(graph.ops[2], inplace_candidates=((three, two),))
    return replace(graph, ops=(*graph.ops[:2], shared, *graph.ops[3:]))


def _step(graph: Graph, transient: tuple[int, ...], asked: list[tuple[int, str | Policy]], **found: bool) -> AsEager:
    def within(total: int, policy: str | Policy) -> Plan:
        """Return a plan within a total, and note what was asked."""
        asked.append((total, policy))
        options = PlanOptions(budget=total, policy=policy)
        return plan_within(_scheduled(graph), options, DEVICES["a100"], transient=transient)

    known = {"saved": False, "copies": False, **found}
    return AsEager(graph=graph, transient=transient, options=DEFAULTS, replan=within, **known)


def test_a_plan_that_needs_no_more_than_eager_stays() -> None:
    graph, asked = _saved(), list[tuple[int, "str | Policy"]]()
    transient = (0, 0, 2 * SIZE, 0, 0)  # while all is alive
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    assert plan.total < eager_total(graph, transient)
    assert _step(graph, transient, asked).instead_of(plan) is None
    assert not asked


def test_what_the_backward_needs_leaves_the_arena_only_where_it_may() -> None:
    graph, asked = _saved(), list[tuple[int, "str | Policy"]]()
    transient = (0, 0, 2 * SIZE, 0, 4 * SIZE)  # the last while nothing is alive
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    limit = eager_total(graph, transient)
    assert plan.total > limit
    found = _step(graph, transient, asked, saved=True).instead_of(plan)
    assert found is not None
    assert found.total <= limit < plan.total
    assert not asked, "nothing has to be computed again"
    kept = _step(graph, transient, asked).instead_of(plan)
    assert kept is None or kept.outside["intermediate"] == 0
    assert [policy for _, policy in asked] == ["recompute"]


@pytest.mark.parametrize("copies", [True, False])
def test_copies_are_made_only_where_they_may(copies: bool) -> None:
    graph, asked = chain(6), list[tuple[int, "str | Policy"]]()
    transient = tuple(4 * SIZE * (i == len(graph.ops) - 1) for i in range(len(graph.ops)))
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    _step(graph, transient, asked, copies=copies).instead_of(plan)
    assert [policy for _, policy in asked] == ["auto" if copies else "recompute"]


def test_what_would_take_much_longer_is_not_taken() -> None:
    graph = chain(6)
    transient = tuple(4 * SIZE * (i == len(graph.ops) - 1) for i in range(len(graph.ops)))
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)

    def slower(total: int, policy: str | Policy) -> Plan:
        """Return a plan that is predicted to take a fifth more."""
        made = plan_within(_scheduled(graph), PlanOptions(budget="min"), DEVICES["a100"], transient=transient)
        assert made.eviction is not None
        return replace(made, eviction=replace(made.eviction, seconds=1.2, base_seconds=1.0))

    def none(total: int, policy: str | Policy) -> Plan:
        """Find no plan."""
        raise BudgetInfeasible("", op="", smallest=0, where="budget")

    step = _step(graph, transient, [])
    assert replace(step, replan=slower).instead_of(plan) == replace(step, replan=none).instead_of(plan)
