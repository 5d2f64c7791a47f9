from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.core.legal_orders import require_legal
from memplan.core.problem import Interval
from memplan.core.schedule import live_bytes
from memplan.errors import MemplanError
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency
from memplan.schedule import POLICIES, order, traced
from memplan.schedule.auto import listed, repair
from memplan.schedule.graph_arrays import make_graph_arrays
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import sample_graph
from tests.schedule.brute import optimum
from tests.schedule.test_bound import diamonds


@pytest.mark.parametrize("name", list(POLICIES))
@given(graph=graphs())
def test_every_policy_gives_a_legal_order_and_says_what_it_needs(name: str, graph: Graph) -> None:
    schedule = order(graph, name)
    require_legal(graph, schedule.order)
    assert schedule.max_live == max(live_bytes(graph, schedule.order), default=0)
    assert schedule.bound <= schedule.max_live
    assert order(graph, name) == schedule


@given(graphs())
def test_auto_is_never_worse_than_the_traced_order(graph: Graph) -> None:
    best = order(graph)
    assert best.max_live <= traced(graph).max_live
    if best.max_live == traced(graph).max_live:
        assert best.order == traced(graph).order, "no better than traced, then traced"


@given(graphs(), st.booleans(), st.booleans(), st.booleans())
def test_listed_orders_are_legal(graph: Graph, least: bool, latest: bool, backwards: bool) -> None:
    arrays = make_graph_arrays(graph)
    require_legal(graph, arrays.graph_order(listed(arrays, least=least, latest=latest, backwards=backwards)))


@pytest.mark.parametrize("blocks", [4, 8])
def test_blocks_run_one_after_another(blocks: int) -> None:
    """Traced, a head's blocks are all made before the first is used, and then added up; no cut leads out of that."""
    b = GraphBuilder()
    total = b.storage(StorageKind.ACTIVATION, 40, planned=True)
    rows = [[b.storage(StorageKind.ACTIVATION, 10, planned=True) for _ in range(blocks)] for _ in range(2)]
    hidden = b.storage(StorageKind.ACTIVATION, 5, planned=True)
    b.op(Phase.FORWARD, (), (hidden,))
    for made in rows[0]:
        b.op(Phase.FORWARD, (hidden,), (made,))
    for made, used in zip(*rows, strict=True):
        b.op(Phase.FORWARD, (made,), (used,))
    for used in rows[1]:
        b.op(Phase.FORWARD, (used,) if used == rows[1][0] else (used, total), (total,))
    graph = b.graph((total,))
    assert traced(graph).max_live >= 40 + 10 * blocks
    assert order(graph).max_live == 40 + 10 + 10 + 5


@pytest.mark.parametrize("width", [2, 3, 4])
def test_listing_finds_what_no_cut_leads_to(width: int) -> None:
    """All branches grow before the first shrinks, as traced; the best order has one after the other."""
    graph = diamonds(width)
    ops = [graph.ops[i] for i in (0, *range(1, 2 * width, 2), *range(2, 2 * width + 1, 2), 2 * width + 1)]
    late = dataclasses.replace(graph, ops=tuple(ops))
    assert order(late).max_live == optimum(late) < traced(late).max_live


def test_repair_without_work_keeps_the_order() -> None:
    arrays = make_graph_arrays(diamonds(3))
    late = np.array([0, 1, 3, 5, 2, 4, 6, 7, 8])
    assert (repair(arrays, late, lambda _: None) == late).all()


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(MemplanError, match="fastest"):
        order(sample_graph(), "fastest")


def test_a_policy_may_be_a_function() -> None:
    assert order(sample_graph(), traced) == traced(sample_graph())


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
