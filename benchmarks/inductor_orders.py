"""The orders that Inductor's `reorder_for_peak_memory` chooses from, written after torch/_inductor/memory.py (2.13).

There they order fused kernels; here the ops of a graph. `lpmf` is memplan's own policy of that name, which follows
the same rule; `inductor` takes the best of all four by what they need, as Inductor does.
"""

from __future__ import annotations

import heapq

from memplan.core.graph import Graph
from memplan.schedule import Schedule, make_schedule, order, predecessors, traced


def bfs(graph: Graph) -> Schedule:
    """`topological_sort_bfs`: first the ops whose predecessors ran earliest."""
    before = predecessors(graph)
    after: list[list[int]] = [[] for _ in before]
    for op, needed in enumerate(before):
        for p in needed:
            after[p].append(op)
    waiting = [len(needed) for needed in before]
    at: dict[int, int] = {}
    queue: list[tuple[list[int], int]] = [([], op) for op, count in enumerate(waiting) if not count]
    heapq.heapify(queue)
    while queue:
        _, op = heapq.heappop(queue)
        at[op] = len(at)
        for user in after[op]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(queue, (sorted(at[p] for p in before[user]), user))
    return make_schedule(graph, _phased(graph, list(at)), "bfs")


def dfs(graph: Graph) -> Schedule:
    """`topological_sort_dfs`: small ops first, each after its own predecessors, small ones first."""
    before = predecessors(graph)
    size = [sum(graph.storages[s].nbytes for s in graph.touched(op) if graph.storages[s].planned) for op in graph.ops]
    found: dict[int, None] = {}
    for start in sorted(range(len(graph.ops)), key=lambda op: (size[op], op)):
        stack = [(start, False)]
        while stack:
            op, ready = stack.pop()
            if op in found:
                continue
            if ready:
                found[op] = None
                continue
            stack.append((op, True))
            stack += [(p, False) for p in sorted(before[op], key=lambda p: (size[p], p), reverse=True)]
    return make_schedule(graph, _phased(graph, list(found)), "dfs")


def inductor(graph: Graph) -> Schedule:
    """The best of the order as it is, lpmf, bfs and dfs."""
    return min((traced(graph), order(graph, "lpmf"), bfs(graph), dfs(graph)), key=lambda s: s.max_live)


def _phased(graph: Graph, found: list[int]) -> tuple[int, ...]:
    """Forward ops first: Inductor orders the two phases apart. No edge leads from the backward to the forward."""
    return tuple(sorted(found, key=lambda op: op >= graph.forward_ops))
