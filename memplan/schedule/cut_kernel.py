"""Builds the flow network whose minimum cut is the fewest bytes that any order needs while a given op runs."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import numpy as np

from memplan.schedule.graph_arrays import CompiledKernel

BEFORE, FREE, AFTER = 1, 0, -1


@CompiledKernel
def sides_of(v, pred_ptr, pred, succ_ptr, succ):
    """Return, for each op: BEFORE if it must run before `v`, AFTER if it is `v` or must run after it, else FREE."""
    n = pred_ptr.shape[0] - 1
    side = np.zeros(n, np.int64)
    stack = np.empty(n + 2, np.int64)
    side[v] = AFTER
    stack[0], count = v, 1
    while count:
        count -= 1
        u = stack[count]
        for k in range(pred_ptr[u], pred_ptr[u + 1]):
            w = pred[k]
            if side[w] == FREE:
                side[w] = BEFORE
                stack[count] = w
                count += 1
    stack[0], count = v, 1
    while count:
        count -= 1
        u = stack[count]
        for k in range(succ_ptr[u], succ_ptr[u + 1]):
            w = succ[k]
            if side[w] == FREE:
                side[w] = AFTER
                stack[count] = w
                count += 1
    return side


@CompiledKernel
def network(v, side, donor, saved, pred_ptr, pred, touch_ptr, touch, user_ptr, user, size, kept):
    """Return the network: (nodes, tails, heads, capacities, bytes alive in any case, node of each op or storage).

    Node 0, the source, is all ops that run before `v`; node 1, the sink, is `v` and all ops after it. FREE ops, and
    storages whose last use may be on either side, have nodes of their own. An op on the source's side runs before `v`,
    and so do its predecessors. A storage is alive if its producer is on the source's side and its last user is not: its
    bytes are the capacity of the arc from the producer, and arcs of infinite capacity keep all users on the storage's
    side. If `v` is the last to touch `donor` (-1 for none), `saved` bytes less are alive; this is modelled as a storage
    of that size that is alive until all other users of `donor` have run.
    """
    n, m = side.shape[0], size.shape[0]
    infinite = size.sum() + 1
    node = np.empty(n + m, np.int64)
    nodes = 2
    for u in range(n):
        node[u] = 0
        if side[u] == AFTER:
            node[u] = 1
        elif side[u] == FREE:
            node[u] = nodes
            nodes += 1
    own = np.zeros(m, np.bool_)  # touched by v: alive in any case
    fixed = 0
    for k in range(touch_ptr[v], touch_ptr[v + 1]):
        own[touch[k]] = True
        fixed += size[touch[k]]
    most = pred.shape[0] + 2 * user.shape[0] + m + 1
    tail, head, capacity = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    arcs = 0
    for u in range(n):
        if side[u] == FREE:
            for k in range(pred_ptr[u], pred_ptr[u + 1]):
                if side[pred[k]] == FREE:
                    tail[arcs], head[arcs], capacity[arcs] = node[u], node[pred[k]], infinite
                    arcs += 1
    for s in range(m):
        first, origin = user_ptr[s] + 1, node[user[user_ptr[s]]]
        if own[s] or origin == 1:
            continue
        end = 1 if kept[s] else 0
        for k in range(first, user_ptr[s + 1]):
            if node[user[k]] == 1:
                end = 1
            elif end == 0 and node[user[k]] != 0:
                end = nodes
        if end == 0:
            continue
        if end == 1 and origin == 0:
            fixed += size[s]
            continue
        if end > 1:
            nodes += 1
            for k in range(first, user_ptr[s + 1]):
                if node[user[k]] != 0:
                    tail[arcs], head[arcs], capacity[arcs] = end, node[user[k]], infinite
                    arcs += 1
        node[n + s] = end
        tail[arcs], head[arcs], capacity[arcs] = origin, end, size[s]
        arcs += 1
    if donor >= 0:
        end = 0
        for k in range(user_ptr[donor], user_ptr[donor + 1]):
            if node[user[k]] > 1:
                if end == 0:
                    end = nodes
                    nodes += 1
                tail[arcs], head[arcs], capacity[arcs] = end, node[user[k]], infinite
                arcs += 1
        fixed -= saved
        if end > 0:
            tail[arcs], head[arcs], capacity[arcs] = 0, end, saved
            arcs += 1
    return nodes, tail[:arcs], head[:arcs], capacity[:arcs], fixed, node
