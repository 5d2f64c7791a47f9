from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from memplan.errors import MemplanError
from memplan.graph import Graph
from memplan.schedule import POLICIES, cut_bound, live_bytes, make_schedule, order, require_legal, traced
from memplan.schedule.base import Evidence
from memplan.schedule.compiled import Kernel
from memplan.schedule.core import make_core
from memplan.schedule.propagate import propagate
from memplan.schedule.repair import repair
from memplan.schedule.search import Outcome, search
from tests.graph_strategies import graphs
from tests.samples import sample_graph
from tests.schedule.brute import optimum
from tests.schedule.test_bound import diamonds

FAST = [name for name in POLICIES if name != "cpsat"]


@pytest.mark.parametrize("name", FAST)
@given(graph=graphs())
@settings(deadline=None, max_examples=50)
def test_every_policy_gives_a_legal_order_and_says_what_it_needs(name: str, graph: Graph) -> None:
    schedule = order(graph, name)
    require_legal(graph, schedule.order)
    assert schedule.max_live == max(live_bytes(graph, schedule.order), default=0)
    assert schedule.bound <= schedule.max_live
    assert order(graph, name) == schedule


@given(graphs())
@settings(deadline=None)
def test_auto_is_never_worse_than_any_policy_that_it_tries(graph: Graph) -> None:
    best = order(graph)
    for name in ("traced", "early_free", "late_alloc", "lpmf", "greedy", "reverse_greedy"):
        assert best.max_live <= order(graph, name).max_live
    if best.max_live == traced(graph).max_live:
        assert best.order == traced(graph).order, "no better than traced, then traced"


@given(graphs(max_ops=9))
@settings(deadline=None)
def test_exact_and_auto_are_the_optimum_of_brute_force(graph: Graph) -> None:
    for name in ("exact", "auto"):
        schedule = order(graph, name)
        assert schedule.max_live == optimum(graph)
        assert schedule.certified


@given(graphs(max_ops=9))
@settings(deadline=None)
def test_evidence_holds(graph: Graph) -> None:
    schedule = order(graph)
    names = [op.name for op in graph.ops]
    if schedule.evidence is Evidence.CUT:
        assert cut_bound(graph, names.index(schedule.proof)) == schedule.bound
    elif schedule.evidence in (Evidence.SEARCH, Evidence.LONG_SEARCH):
        assert schedule.proof == ""
    elif names:
        op = graph.ops[names.index(schedule.proof)]
        touched = sum(graph.storages[s].nbytes for s in graph.touched(op) if graph.storages[s].planned)
        in_place = max((graph.storages[graph.values[read].storage].nbytes for _, read in op.chances), default=0)
        assert touched - in_place == schedule.bound


@given(graphs(max_ops=7))
@settings(deadline=None, max_examples=20)
def test_cpsat_agrees_with_the_search(graph: Graph) -> None:
    schedule = order(graph, "cpsat")
    require_legal(graph, schedule.order)
    assert schedule.max_live == order(graph, "exact").max_live


@given(graphs(max_ops=9))
@settings(deadline=None)
def test_a_search_is_right_about_every_target(graph: Graph) -> None:
    """FOUND at and above the optimum, EXHAUSTED below, in both directions of time, when nothing is dropped."""
    core, best = make_core(graph), optimum(graph)
    for target in (best - 1, best, best + 17):
        for backwards in (True, False):
            found = search(core, target, width=1000, limit=10**9, backwards=backwards)
            assert found.outcome is (Outcome.FOUND if target >= best else Outcome.EXHAUSTED)
            if found.outcome is Outcome.FOUND:
                assert make_schedule(graph, core.graph_order(found.order), "").max_live <= target
            narrow = search(core, target, width=1, limit=10**9, backwards=backwards)
            assert narrow.outcome in (found.outcome, Outcome.GAVE_UP)


@given(graphs(max_ops=9))
@settings(deadline=None)
def test_edges_that_are_propagated_keep_the_best_order(graph: Graph) -> None:
    core, best = make_core(graph), optimum(graph)
    for target in (best, best + 17):
        narrower = propagate(core, core.traced, target, 10**9).core
        assert narrower is not None
        assert search(narrower, target, width=1000, limit=10**9).outcome is Outcome.FOUND


def test_two_cuts_exclude_what_one_cannot() -> None:
    """Of two branches either may come last; the other's result is alive then."""
    core = make_core(diamonds(2))
    best = optimum(diamonds(2))
    assert propagate(core, core.traced, best - 1, 10**9).core is None
    assert propagate(core, core.traced, best - 1, 0).core is core, "without work, nothing is claimed"


@given(graphs())
@settings(deadline=None)
def test_compiled_and_interpreted_kernels_agree(graph: Graph) -> None:
    """Every kernel, both ways, on the way to the same schedule."""
    schedule = order(graph)
    call = Kernel.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__call__", lambda self, _, *args: call(self, 10**6, *args))
        assert order(graph) == schedule


def test_repair_without_work_keeps_the_order() -> None:
    core = make_core(diamonds(3))
    late = np.array([0, 1, 3, 5, 2, 4, 6, 7, 8])
    assert (repair(core, late, lambda _: None) == late).all()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(MemplanError, match="fastest"):
        order(sample_graph(), "fastest")


def test_a_policy_may_be_a_function() -> None:
    assert order(sample_graph(), traced) == traced(sample_graph())
