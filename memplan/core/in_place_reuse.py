"""Chooses the in-place candidates that an order uses: all that are possible, as each only lowers the live bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from memplan.core.graph import Graph


def used_candidates(graph: Graph, order: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield pairs (op, the in-place candidate that it uses) in a legal `order`.

    Of the candidates whose input has its last use at the op, it is the one with the most bytes, the first of equals.
    Linear in the storages that the ops touch.
    """
    last = {storage: op for op in order for storage in graph.touched(graph.ops[op])}
    for index in order:
        found, most = None, 0
        for candidate in graph.ops[index].inplace_candidates:
            storage = graph.values[candidate[1]].storage
            if last[storage] == index and graph.storages[storage].nbytes > most:
                found, most = candidate, graph.storages[storage].nbytes
        if found is not None:
            yield index, found


def placed(graph: Graph, order: Sequence[int]) -> Graph:
    """Return the graph with in-place reuse applied under a legal `order`: a result that takes the bytes of an input
    becomes a value of that input's storage. Ops and their candidates are unchanged.
    """
    if not any(op.inplace_candidates for op in graph.ops):
        return graph
    donor: dict[int, int] = {}  # storage -> the first storage that had its bytes
    for _, (result, read) in used_candidates(graph, order):
        given = graph.values[read].storage
        donor[graph.values[result].storage] = donor.get(given, given)
    values = tuple(replace(v, storage=donor[v.storage]) if v.storage in donor else v for v in graph.values)
    return replace(graph, values=values)
