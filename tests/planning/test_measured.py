"""Tests of plans that replace one without a budget, which needs more than eager once temporaries are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.planning.base_graph import eager_total
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import no_more_than_eager, with_temporaries
from memplan.planning.options import DEFAULTS
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


def _instead(plan: Plan, graph: Graph, transient: tuple[int, ...], *, saved: bool = False) -> Plan | None:
    return no_more_than_eager(plan, graph, transient, DEFAULTS, saved=saved)


def test_a_plan_that_needs_no_more_than_eager_stays() -> None:
    graph = _saved()
    transient = (0, 0, 2 * SIZE, 0, 0)  # while all is alive
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    assert plan.total < eager_total(graph, transient)
    assert _instead(plan, graph, transient) is None


def test_what_the_backward_needs_leaves_the_arena_only_where_it_may() -> None:
    graph = _saved()
    transient = (0, 0, 2 * SIZE, 0, 4 * SIZE)  # the last while nothing is alive
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    limit = eager_total(graph, transient)
    assert plan.total > limit
    found = _instead(plan, graph, transient, saved=True)
    assert found is not None
    assert found.total <= limit < plan.total
    kept = _instead(plan, graph, transient)
    assert kept is None or kept.outside["intermediate"] == 0


@pytest.mark.parametrize("length", [3, 6, 12])
@pytest.mark.parametrize("saved", [True, False])
def test_nothing_is_evicted_without_a_budget(length: int, saved: bool) -> None:
    graph = chain(length)
    transient = tuple(4 * SIZE * (i == len(graph.ops) - 1) for i in range(len(graph.ops)))
    plan = with_temporaries(make_plan(_scheduled(graph)), transient)
    assert plan.total > eager_total(graph, transient), "or nothing would be looked for"
    found = _instead(plan, graph, transient, saved=saved) or plan
    assert found.eviction is None
    assert [op.target for op in found.graph.ops] == [op.target for op in graph.ops]
