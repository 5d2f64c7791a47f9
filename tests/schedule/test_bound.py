from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.schedule import Evidence, working_set_bound
from memplan.schedule import cut_bound, traced
from memplan.schedule.auto import auto
from memplan.schedule.cut import cut, min_cut
from memplan.schedule.graph_arrays import make_graph_arrays, step_bytes
from tests.graph_strategies import GraphBuilder, graphs, schedules
from tests.schedule.brute import core_order, least_at, optimum


@st.composite
def networks(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    nodes = draw(st.integers(2, 8))
    arc = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1), st.integers(0, 9))
    return nodes, draw(st.lists(arc.filter(lambda a: a[0] != a[1]), max_size=24))


@given(networks())
def test_flow_and_cut_are_those_of_networkx(network: tuple[int, list[tuple[int, int, int]]]) -> None:
    nodes, arcs = network
    theirs = nx.DiGraph()
    theirs.add_nodes_from(range(nodes))
    for u, v, c in arcs:
        theirs.add_edge(u, v, capacity=c + (theirs[u][v]["capacity"] if theirs.has_edge(u, v) else 0))
    tail, head, capacity = (np.array([a[i] for a in arcs], np.int64) for i in range(3))
    flow, near = min_cut(nodes, tail, head, capacity)
    # networkx finds the cut nearest to the sink; that of the reversed network is nearest to the source.
    least, (_, source_side) = nx.minimum_cut(theirs.reverse(), 1, 0)
    assert flow == least == sum(c for u, v, c in arcs if near[u] and not near[v])
    assert set(np.flatnonzero(near).tolist()) == source_side


@given(graphs(max_ops=6))
def test_the_cut_at_an_op_is_the_least_that_any_order_needs_there(graph: Graph) -> None:
    """Exactly, by brute force; an op alone is the barrier's case too, as both phases are drawn."""
    for op in range(len(graph.ops)):
        assert cut_bound(graph, op) == least_at(graph, op)


def test_the_cut_alone_proves_a_ladder() -> None:
    """Where large results must outlive what follows, as in training and UNets, one cut is the optimum."""
    for depth in range(2, 5):
        graph = ladder(depth)
        best = max(cut_bound(graph, op) for op in range(len(graph.ops)))
        assert working_set_bound(graph) < best == optimum(graph)
        assert auto(graph).evidence is Evidence.CUT


def ladder(depth: int) -> Graph:
    """Down a chain of results of 100 bytes, and up again through each of them, with 10 bytes on the way."""
    b = GraphBuilder()
    down = [b.storage(StorageKind.ACTIVATION, 100, planned=True) for _ in range(depth)]
    for i, value in enumerate(down):
        b.op(Phase.FORWARD, tuple(down[max(i - 1, 0) : i]), (value,))
    up: tuple[int, ...] = ()
    for value in reversed(down):
        b.op(Phase.FORWARD, (value, *up), (b.storage(StorageKind.ACTIVATION, 10, planned=True),))
        up = b.ops[-1].writes
    return b.graph()


def diamonds(width: int) -> Graph:
    """One source, `width` branches that each grow and shrink again, and a sum of their small results."""
    b = GraphBuilder()
    source = b.storage(StorageKind.ACTIVATION, 50, planned=True)
    b.op(Phase.FORWARD, (), (source,))
    small = []
    for _ in range(width):
        large = b.storage(StorageKind.ACTIVATION, 100, planned=True)
        b.op(Phase.FORWARD, (source,), (large,))
        small.append(b.storage(StorageKind.ACTIVATION, 10, planned=True))
        b.op(Phase.FORWARD, (large,), (small[-1],))
    total = b.storage(StorageKind.OUTPUT, 10, planned=False)
    b.op(Phase.FORWARD, tuple(small), (total,))
    return b.graph((total,))


@given(st.data())
def test_no_order_is_below_a_cut(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    order = data.draw(schedules(graph)).order
    arrays = make_graph_arrays(graph)
    steps = step_bytes(arrays, core_order(arrays, order))
    for step, op in enumerate(core_order(arrays, order)):
        found = cut(arrays, int(op))
        assert found.bytes <= steps[step]
        assert not found.ideal[op]
        for u in range(arrays.n):  # the ideal is one: with each op all that it needs
            assert not found.ideal[u] or found.ideal[arrays.pred[arrays.pred_ptr[u] : arrays.pred_ptr[u + 1]]].all()


@given(st.data())
def test_the_arrays_are_their_graph(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    arrays = make_graph_arrays(graph)
    order = core_order(arrays, schedule.order)
    assert arrays.graph_order(order) == schedule.order
    steps = step_bytes(arrays, order)
    assert steps.max(initial=0) == schedule.max_live


def test_an_empty_graph_needs_nothing() -> None:
    assert auto(GraphBuilder().graph()) == traced(GraphBuilder().graph()).__class__(
        policy="traced", order=(), max_live=0, bound=0
    )
