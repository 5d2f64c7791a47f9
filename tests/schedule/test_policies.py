from __future__ import annotations

import pytest
from hypothesis import given

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.core.problem import Interval
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency
from memplan.schedule import POLICIES, live_bytes, make_schedule, order, require_legal, traced
from memplan.schedule.graph_arrays import CompiledKernel, make_graph_arrays
from memplan.schedule.ideals import SearchOutcome, search
from tests.graph_strategies import GraphBuilder, graphs
from tests.schedule.brute import optimum


@pytest.mark.parametrize("name", list(POLICIES))
@given(graph=graphs())
def test_every_policy_gives_a_legal_order_and_says_what_it_needs(name: str, graph: Graph) -> None:
    schedule = order(graph, name)
    require_legal(graph, schedule.order)
    assert schedule.max_live == max(live_bytes(graph, schedule.order), default=0)
    assert schedule.bound <= schedule.max_live
    assert order(graph, name) == schedule


@given(graphs())
def test_auto_is_never_worse_than_any_policy_that_it_tries(graph: Graph) -> None:
    best = order(graph)
    for name in ("traced", "early_free", "late_alloc", "lpmf", "greedy", "reverse_greedy"):
        assert best.max_live <= order(graph, name).max_live
    if best.max_live == traced(graph).max_live:
        assert best.order == traced(graph).order, "no better than traced, then traced"


@given(graphs(max_ops=9))
def test_exact_and_auto_are_the_optimum_of_brute_force(graph: Graph) -> None:
    for name in ("exact", "auto"):
        schedule = order(graph, name)
        assert schedule.max_live == optimum(graph)
        assert schedule.certified


@given(graphs(max_ops=9))
def test_a_search_is_right_about_every_target(graph: Graph) -> None:
    """FOUND at and above the optimum, EXHAUSTED below, in both directions of time, when nothing is dropped."""
    arrays, best = make_graph_arrays(graph), optimum(graph)
    for target in (best - 1, best, best + 17):
        for backwards in (True, False):
            found = search(arrays, target, width=1000, limit=10**9, backwards=backwards)
            assert found.outcome is (SearchOutcome.FOUND if target >= best else SearchOutcome.EXHAUSTED)
            if found.outcome is SearchOutcome.FOUND:
                assert make_schedule(graph, arrays.graph_order(found.order), "").max_live <= target
            narrow = search(arrays, target, width=1, limit=10**9, backwards=backwards)
            assert narrow.outcome in (found.outcome, SearchOutcome.GAVE_UP)


@given(graphs())
def test_compiled_and_interpreted_kernels_agree(graph: Graph) -> None:
    """Every kernel, both ways, on the way to the same schedule."""
    schedule = order(graph)
    call = CompiledKernel.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledKernel, "__call__", lambda self, _, *args: call(self, 10**6, *args))
        assert order(graph) == schedule


def reused() -> Graph:
    """x(100) -> tanh(x)(100), and x -> small(10), in this order; all go into y, the caller's."""
    b = GraphBuilder()
    x, wide, small = (b.storage(StorageKind.ACTIVATION, n, planned=True) for n in (100, 100, 10))
    y = b.storage(StorageKind.OUTPUT, 8, planned=False)
    b.op(Phase.FORWARD, (), (x,))
    b.op(Phase.FORWARD, (x,), (wide,), target="aten.tanh.default")
    b.op(Phase.FORWARD, (x,), (small,))
    b.op(Phase.FORWARD, (wide, small), (y,))
    return with_inplace_candidates(b.graph((y,)))


def test_order_and_in_place_reuse_are_chosen_together() -> None:
    """Traced, x is read once more after the tanh; in the best order the tanh comes last and lies in x."""
    graph = reused()
    best = order(graph)
    assert (traced(graph).max_live, best.max_live) == (210, 110)
    assert best.certified
    assert best.order == (0, 2, 1, 3)
    plan = make_plan(ScheduledGraph(model="m", graph=graph, schedule=best, alignment=1, versions={}))
    assert [(b.id, b.size, b.live) for b in plan.problem.buffers] == [
        ("activation_0", 100, Interval(0, 4)),
        ("activation_2", 10, Interval(1, 4)),
    ]
    check_consistency(plan)
