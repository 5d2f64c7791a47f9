"""Oracles that share nothing with the policies: every legal order, every ideal, by recursion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from memplan.core.graph import Graph
from memplan.core.legal_orders import predecessors
from memplan.core.schedule import live_bytes
from memplan.schedule.graph_arrays import GraphArrays, Ints


def core_order(arrays: GraphArrays, order: Sequence[int]) -> Ints:
    """An order of the graph's ops in the numbers of the arrays, with the barrier after the forward."""
    numbers = np.asarray(order, np.int64)
    return np.insert(numbers + (numbers >= arrays.barrier), arrays.barrier, arrays.barrier)


def all_orders(graph: Graph) -> Iterator[tuple[int, ...]]:
    """Every legal order of a small graph."""
    before = predecessors(graph)
    split = graph.forward_ops

    def extend(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(graph.ops):
            yield order
            return
        for op in range(split) if len(order) < split else range(split, len(graph.ops)):
            if op not in order and before[op] <= set(order):
                yield from extend((*order, op))

    return extend(())


def optimum(graph: Graph) -> int:
    """The least max live of all orders, over ideals: what an ideal holds does not depend on its order."""
    before = predecessors(graph)
    split = graph.forward_ops
    touchers = {s: {i for i, op in enumerate(graph.ops) if s in graph.touched(op)} for s in range(len(graph.storages))}
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}

    def alive(done: frozenset[int], op: int) -> int:
        now = done | {op}
        return sum(
            storage.nbytes
            for s, storage in enumerate(graph.storages)
            if storage.planned and touchers[s] & now and (s in kept or touchers[s] - done)
        ) - max(
            (
                graph.storages[s].nbytes
                for _, v in graph.ops[op].inplace_candidates
                if touchers[s := graph.values[v].storage] <= now
            ),
            default=0,
        )

    best: dict[frozenset[int], int] = {frozenset(): 0}
    for _ in graph.ops:
        following: dict[frozenset[int], int] = {}
        for done, needs in best.items():
            for op in range(split) if len(done) < split else range(split, len(graph.ops)):
                if op not in done and before[op] <= done:
                    peak = max(needs, alive(done, op))
                    following[done | {op}] = min(peak, following.get(done | {op}, peak))
        best = following
    return min(best.values())


def least_at(graph: Graph, op: int) -> int:
    """The least bytes alive while `op` runs, over all legal orders."""
    return min(live_bytes(graph, order)[order.index(op)] for order in all_orders(graph))
