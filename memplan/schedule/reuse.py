"""Which in-place chances an order takes: all that it leaves, as each only lowers what is alive at its op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.graph import Graph


def placed(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph as it lies in memory under a legal `order`: a result that takes the bytes of an input is a value of
    that input's storage. Ops and their chances stay; of several chances of one op the largest is taken, the
    first of equals. Linear in what ops touch.
    """
    if not any(op.chances for op in graph.ops):
        return graph
    last = {storage: op for op in order for storage in graph.touched(graph.ops[op])}
    host: dict[int, int] = {}  # storage -> the first storage that had its bytes
    for index in order:
        best = -1, -1, -1
        for result, read in graph.ops[index].chances:
            storage = graph.values[read].storage
            if last[storage] == index and graph.storages[storage].nbytes > best[0]:
                best = graph.storages[storage].nbytes, graph.values[result].storage, storage
        if best[0] > 0:
            host[best[1]] = host.get(best[2], best[2])
    values = tuple(replace(v, storage=host[v.storage]) if v.storage in host else v for v in graph.values)
    return replace(graph, values=values)
