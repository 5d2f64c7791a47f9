"""Tests of plans that replace one without a budget, which needs more than eager once temporaries are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.core.totals import functional_transient
from memplan.planning.base_graph import eager_total
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import left_outside, no_more_than_eager, with_temporaries
from memplan.planning.options import DEFAULTS
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, graphs
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


def _copied(graph: Graph) -> int:
    """Return the bytes that kernels return in fresh memory, and that are copied into the arena."""
    fresh = {s for op in graph.ops if not op.direct for s in graph.written(op)}
    return sum(graph.storages[s].nbytes for s in fresh if graph.storages[s].planned)


def _returning(graph: Graph, fresh: set[int], device: str) -> tuple[Plan, tuple[int, ...]]:
    """Return the plan of a graph on a device, of which these ops return fresh memory, and what its ops allocate."""
    ops = tuple(replace(op, direct=i not in fresh) for i, op in enumerate(graph.ops))
    storages = tuple(replace(s, device=device) for s in graph.storages)
    plan = make_plan(_scheduled(replace(graph, ops=ops, storages=storages)))
    transient = functional_transient(plan.graph)
    return with_temporaries(plan, transient), transient


@given(graphs(), st.data())
def test_on_an_accelerator_fresh_results_are_used_where_they_are_if_that_takes_no_byte_more(
    graph: Graph, data: st.DataObject
) -> None:
    fresh = data.draw(st.sets(st.integers(0, 9)))
    plan, transient = _returning(graph, fresh, "cuda:0")
    found = left_outside(plan, plan.graph, transient, DEFAULTS, saved=True)
    if found is not None:
        assert found.on_device <= plan.on_device
        assert found.schedule.order == plan.schedule.order
        assert _copied(found.graph) <= _copied(plan.graph)


def test_an_accelerator_copies_fresh_results_only_where_the_arena_is_fullest() -> None:
    graph = chain(6)
    for device, copied in (("cuda:0", 2), ("cpu", None)):
        plan, transient = _returning(graph, set(range(len(graph.ops))), device)
        found = left_outside(plan, plan.graph, transient, DEFAULTS, saved=True) or plan
        least = _instead(plan, plan.graph, transient, saved=True) or plan
        assert _copied(found.graph) == (_copied(least.graph) if copied is None else copied * SIZE)
