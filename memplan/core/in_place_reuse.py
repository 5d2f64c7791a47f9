"""Which in-place chances an order takes: all that it leaves, as each only lowers what is alive at its op."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.core.graph import Graph


def taken(graph: Graph, order: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(op, the chance that it takes) in a legal `order`: of those whose input dies at the op the one of most bytes,
    the first of equals. Linear in what ops touch.
    """
    last = {storage: op for op in order for storage in graph.touched(graph.ops[op])}
    for index in order:
        found, most = None, 0
        for chance in graph.ops[index].inplace_candidates:
            storage = graph.values[chance[1]].storage
            if last[storage] == index and graph.storages[storage].nbytes > most:
                found, most = chance, graph.storages[storage].nbytes
        if found is not None:
            yield index, found


def placed(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph as it lies in memory under a legal `order`: a result that takes the bytes of an input is a value of
    that input's storage. Ops and their chances stay.
    """
    if not any(op.inplace_candidates for op in graph.ops):
        return graph
    host: dict[int, int] = {}  # storage -> the first storage that had its bytes
    for _, (result, read) in taken(graph, order):
        given = graph.values[read].storage
        host[graph.values[result].storage] = host.get(given, given)
    values = tuple(replace(v, storage=host[v.storage]) if v.storage in host else v for v in graph.values)
    return replace(graph, values=values)
