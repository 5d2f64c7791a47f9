from __future__ import annotations

import dataclasses
from itertools import product
from operator import mul
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Origin, Phase, StorageKind, Value, check_graph, require_same
from memplan.core.legal_orders import predecessors, require_legal
from memplan.errors import InvalidPlan, PlanMismatch
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import sample_graph


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
def test_dense_values_have_an_element_at_each_place_up_to_their_last(dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(n for n, _ in dims), tuple(stride for _, stride in dims)
    value = Value(name="v", storage=0, dtype="float32", shape=shape, strides=strides, offset=0)
    places = [sum(map(mul, at, strides)) for at in product(*map(range, shape))]
    assert value.dense == (sorted(places) == list(range(len(places))))


def test_the_figures_of_a_graph() -> None:
    graph = sample_graph()
    assert graph.touched(graph.ops[0]) == (0, 1, 2)
    assert graph.written(graph.ops[0]) == (2,)
    assert [graph.functional_bytes(op) for op in graph.ops] == [0, 60, 0, 0, 0]
    assert graph.bytes_of(StorageKind.INPUT, StorageKind.PARAMETER) == 140
    assert graph.bytes_of(StorageKind.ACTIVATION, planned=True) == 260
    assert graph.bytes_of(StorageKind.ACTIVATION) == 0


@given(graphs())
def test_random_graphs_are_graphs(graph: Graph) -> None:
    check_graph(graph)
    assert graph.forward_ops == sum(op.phase is Phase.FORWARD for op in graph.ops)
    require_same(graph, dataclasses.replace(graph))


@given(graphs())
def test_names_of_files_do_not_change_the_fingerprint(graph: Graph) -> None:
    moved = tuple(dataclasses.replace(op, origin=Origin(source="elsewhere.py:1")) for op in graph.ops)
    assert dataclasses.replace(graph, ops=moved).fingerprint == graph.fingerprint


def test_the_first_difference_is_named() -> None:
    graph = sample_graph()
    ops = list(graph.ops)
    ops[2] = dataclasses.replace(ops[2], target="aten.mean")
    with pytest.raises(PlanMismatch, match=r"aten\.sum(.|\n)*aten\.mean"):
        require_same(graph, dataclasses.replace(graph, ops=tuple(ops)))
    with pytest.raises(PlanMismatch, match="gradients"):
        require_same(graph, dataclasses.replace(graph, gradients=()))


def _broken(part: str, **changes: Any) -> Graph:
    """The sample graph with something wrong in itself, or in the first of its storages, values or ops."""
    graph = sample_graph()
    if not part:
        return dataclasses.replace(graph, **changes)
    first, *rest = getattr(graph, part)
    parts: dict[str, Any] = {part: (dataclasses.replace(first, **changes), *rest)}
    return dataclasses.replace(graph, **parts)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("values", {"storage": 99}),
        ("values", {"storage": -1}),
        ("values", {"shape": (1, 2)}),
        ("values", {"shape": (-1,)}),
        ("values", {"strides": (-1,)}),
        ("values", {"offset": -1}),
        ("ops", {"reads": (99,)}),
        ("ops", {"writes": (-1,)}),
        ("ops", {"phase": Phase.BACKWARD}),
        ("storages", {"nbytes": -1}),
        ("storages", {"name": "parameter_1"}),
        ("", {"outputs": (99,)}),
        ("", {"gradients": (-1,)}),
    ],
)
def test_what_cannot_be_is_refused(part: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlan, match="graph"):
        check_graph(_broken(part, **changes))


@given(graphs())
def test_the_networkx_graph_has_every_dependency_and_no_other(graph: Graph) -> None:
    made = graph.to_networkx()
    assert [made.nodes[i]["name"] for i in range(len(graph.ops))] == [op.name for op in graph.ops]
    assert [frozenset(made.predecessors(i)) for i in range(len(graph.ops))] == list(predecessors(graph))
    require_legal(graph, tuple(nx.lexicographical_topological_sort(made, key=lambda i: (i >= graph.forward_ops, -i))))


def test_the_networkx_graph_says_why_an_op_waits() -> None:
    b = GraphBuilder()
    x, y = (b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for nbytes in (100, 20))
    b.op(Phase.FORWARD, (), (x,), random=True, target="aten.rand")
    b.op(Phase.FORWARD, (x,), (y,))
    b.op(Phase.BACKWARD, (y,), (), random=True)
    made = b.graph().to_networkx()
    assert made.edges[0, 1]["storages"] == ("activation_0",)
    assert made.edges[0, 2]["storages"] == ()  # random ops keep their order
    about = {"name": "op0", "target": "aten.rand", "phase": "forward", "module": "", "source": "", "nbytes": 100}
    assert made.nodes[0] == about
