"""Computes a maximum flow and its minimum cut (Dinic 1970: shortest augmenting paths in phases)."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import numpy as np

from memplan.schedule.arrays.compiled import CompiledKernel


@CompiledKernel
def max_flow(nodes, tail, head, capacity):
    """Return the maximum flow from node 0 to node 1, the source's side of the minimum cut, and the number of arcs
    visited.

    Of several minimum cuts it is the one nearest to the source. Arc i goes from `tail[i]` to `head[i]`. Residual arcs
    2 i and 2 i + 1 are each other's reverse.
    """
    arcs = tail.shape[0]
    start = np.zeros(nodes + 1, np.int64)
    for i in range(arcs):
        start[tail[i] + 1] += 1
        start[head[i] + 1] += 1
    for u in range(nodes):
        start[u + 1] += start[u]
    fill, arc_at = start[:-1].copy(), np.empty(2 * arcs, np.int64)
    to, room = np.empty(2 * arcs, np.int64), np.zeros(2 * arcs, np.int64)
    for i in range(arcs):
        to[2 * i], to[2 * i + 1], room[2 * i] = head[i], tail[i], capacity[i]
        arc_at[fill[tail[i]]] = 2 * i
        fill[tail[i]] += 1
        arc_at[fill[head[i]]] = 2 * i + 1
        fill[head[i]] += 1
    level, queue = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    path, flow, work = np.empty(nodes + 1, np.int64), 0, 2 * arcs
    while True:
        level[:] = -1
        level[0], queue[0], filled, at = 0, 0, 1, 0
        while at < filled:
            u = queue[at]
            at += 1
            work += start[u + 1] - start[u]
            for k in range(start[u], start[u + 1]):
                a = arc_at[k]
                if room[a] > 0 and level[to[a]] < 0:
                    level[to[a]] = level[u] + 1
                    queue[filled] = to[a]
                    filled += 1
        if level[1] < 0:
            return flow, level >= 0, work
        fill[:] = start[:-1]
        u, length = 0, 0
        while True:
            if u == 1:
                least, first = room[path[0]], 0
                for i in range(1, length):
                    if room[path[i]] < least:
                        least, first = room[path[i]], i
                for i in range(length):
                    room[path[i]] -= least
                    room[path[i] ^ 1] += least
                flow += least
                work += length
                u, length = to[path[first] ^ 1], first
            while fill[u] < start[u + 1]:
                a = arc_at[fill[u]]
                if room[a] > 0 and level[to[a]] == level[u] + 1:
                    break
                fill[u] += 1
                work += 1
            if fill[u] < start[u + 1]:
                path[length] = arc_at[fill[u]]
                length += 1
                u = to[path[length - 1]]
            elif u == 0:
                break
            else:
                length -= 1
                u = to[path[length] ^ 1]
                fill[u] += 1
