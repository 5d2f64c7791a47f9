"""The oracle of evictions, held against graphs that leave something out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.errors import InvalidEviction
from memplan.evict.equivalent import require_equivalent
from memplan.graph import Graph, Phase, StorageKind
from tests.graph_strategies import GraphBuilder


def _filled(part: int) -> Graph:
    """16 bytes are written whole, then their first `part` again; a last op reads all of them."""
    b = GraphBuilder()
    given = b.storage(StorageKind.INPUT, 8, planned=False)
    made = b.storage(StorageKind.ACTIVATION, 16, planned=True)
    first = b.view(1, part)
    out = b.storage(StorageKind.OUTPUT, 4, planned=False)
    b.op(Phase.FORWARD, (given,), (made,))
    b.op(Phase.FORWARD, (given,), (first,))
    b.op(Phase.FORWARD, (made,), (out,))
    return Graph(ops=tuple(b.ops), values=tuple(b.values), storages=tuple(b.storages), outputs=(out,), gradients=())


def _late_first(graph: Graph) -> tuple[Graph, tuple[int, ...]]:
    """The same with its first op moved behind the second."""
    order = (1, 0, 2)
    return replace(graph, ops=tuple(graph.ops[i] for i in order)), order


@pytest.mark.parametrize("part", [0, 1, 8, 15])
def test_a_write_of_some_bytes_leaves_the_others_as_they_were(part: int) -> None:
    graph = _filled(part)
    require_equivalent(graph, graph, (0, 1, 2))
    with pytest.raises(InvalidEviction, match="op2"):
        require_equivalent(graph, *_late_first(graph))
    unwritten = replace(graph, ops=(graph.ops[0], graph.ops[1], graph.ops[1], graph.ops[2]))
    with pytest.raises(InvalidEviction):
        require_equivalent(graph, unwritten, (0, 1, 1, 2))


def test_a_write_of_all_bytes_forgets_what_was_there() -> None:
    graph = _filled(16)
    twice = replace(graph, ops=(*graph.ops[:2], graph.ops[1], graph.ops[2]))
    require_equivalent(graph, twice, (0, 1, 1, 2))
