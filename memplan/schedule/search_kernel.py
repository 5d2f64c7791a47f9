"""Searches for an order that needs at most a target, level by level over ideals, compiled by numba.

A state is an ideal: the set of ops that have run; level k holds ideals of k ops, each reached without ever
exceeding the target. Live bytes are submodular in the ideal, and the bytes that an op needs in addition only fall as
the ideal grows (with in-place reuse too, as more inputs have had their other uses). This allows two exact reductions:
- an op that frees at least as much as it allocates, and fits, may run at once: the state gets no other child. The same
  holds for two ops, the second of which only waits for the first, that do so together but not the first alone;
- if a state J has no such op and needs no more than the root I of the search, then J becomes the new root and all other
  states are dropped: every order that continues from I can run the ops of J first and its other ops afterwards, and
  needs no more at any step. (This holds if no ideal between I and J needs less than J. The smallest such ideal, closed
  under the first reduction, would have been found before J, as levels are in order of size.)
Only the width makes the search inexact: of more states than that, those with the fewest live bytes are kept.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment"
from __future__ import annotations

import numpy as np

from memplan.schedule.graph_arrays import CompiledKernel

FOUND, EXHAUSTED, GAVE_UP = 0, 1, 2


@CompiledKernel
def levels(
    target, width, limit, keys, waiting, left, ready, pred_ptr, succ_ptr, succ, touch_ptr, touch, user_ptr,
    size, given, kept, backwards, chance_ptr, donor, saved,
):  # fmt: skip
    """Search for an order within `target` bytes; returns (outcome, order, work, states dropped).

    The outcome is FOUND, EXHAUSTED if there is no such order, or GAVE_UP after `limit` units of work or if `width`
    dropped states. `keys` has a random number per op (Zobrist hashing). `waiting`, `left` and `ready` are tables of
    2 `width` rows: open predecessors of ops, open uses of storages, ready ops.
    """
    n, m = touch_ptr.shape[0] - 1, size.shape[0]
    uses = user_ptr[1:] - user_ptr[:-1] + kept
    count = np.zeros(2 * width, np.int64)
    live, row, key = np.zeros(width, np.int64), np.zeros(width, np.int64), np.zeros(width, np.int64)
    parents, moves = np.empty((n, width), np.int32), np.empty((n, width), np.int32)
    waiting[0] = pred_ptr[1:] - pred_ptr[:-1]
    left[0] = uses
    for v in range(n):
        if waiting[0, v] == 0:
            ready[0, count[0]] = v
            count[0] += 1
    for s in range(m):
        live[0] += size[s] * given[s]
    spare, spares = np.arange(2 * width - 1, -1, -1), 2 * width - 1  # rows that no state uses, row 1 on top
    order = np.empty(n, np.int64)
    states, root, dropped, work = 1, live[0], 0, 0
    room = 4 * width + n
    c_parent, c_move = np.empty(room, np.int64), np.empty(room, np.int64)
    c_live, c_key = np.empty(room, np.int64), np.empty(room, np.int64)
    for step in range(n):
        children, valley, valley_begin, valley_end = 0, -1, 0, 0
        for i in range(states):
            r, begin, safe = row[i], children, 0
            for j in range(count[r]):
                v = ready[r, j]
                alloc, freed = 0, 0
                for k in range(touch_ptr[v], touch_ptr[v + 1]):
                    s = touch[k]
                    if left[r, s] == uses[s] and not given[s]:
                        alloc += size[s]
                    if left[r, s] == 1:
                        freed += size[s]
                less = 0  # bytes that in-place reuse saves while v runs
                for k in range(chance_ptr[v], chance_ptr[v + 1]):
                    s = donor[k]
                    if (left[r, s] == uses[s] and not given[s]) if backwards else left[r, s] == 1:
                        less = max(less, saved[k])
                work += 1 + touch_ptr[v + 1] - touch_ptr[v]
                if live[i] + alloc - less > target:
                    continue
                free = 2 if alloc <= freed else 0  # 1: together with the next op
                if free == 0 and safe < 2:
                    for k in range(succ_ptr[v], succ_ptr[v + 1]):
                        w = succ[k]
                        if waiting[r, w] != 1 or (safe == 1 and v > c_move[begin]):
                            continue
                        needs, gone = 0, 0
                        for a in range(touch_ptr[w], touch_ptr[w + 1]):
                            s = touch[a]
                            before = left[r, s]
                            for b in range(touch_ptr[v], touch_ptr[v + 1]):
                                if touch[b] == s:
                                    before -= 1
                            if before == uses[s] and not given[s]:
                                needs += size[s]
                            if before == 1:
                                gone += size[s]
                        work += 1 + touch_ptr[w + 1] - touch_ptr[w]
                        if alloc - freed + needs <= gone and live[i] + alloc - freed + needs <= target:
                            free = 1
                            break
                if free > 0:
                    if free > safe or (free == safe and v < c_move[begin]):
                        safe, children = free, begin
                    else:
                        continue
                elif safe > 0:
                    continue
                if children == room:
                    room *= 2
                    c_parent = np.concatenate((c_parent, c_parent))
                    c_move = np.concatenate((c_move, c_move))
                    c_live = np.concatenate((c_live, c_live))
                    c_key = np.concatenate((c_key, c_key))
                c_parent[children], c_move[children] = i, v
                c_live[children], c_key[children] = live[i] + alloc - freed, key[i] ^ keys[v]
                children += 1
            if safe == 0 and step > 0 and live[i] <= root and (valley < 0 or live[i] < live[valley]):
                valley, valley_begin, valley_end = i, begin, children
        if valley >= 0:
            root, children = live[valley], valley_end - valley_begin
            for c in range(children):
                c_parent[c], c_move[c] = c_parent[valley_begin + c], c_move[valley_begin + c]
                c_live[c], c_key[c] = c_live[valley_begin + c], c_key[valley_begin + c]
        if children == 0:
            return GAVE_UP if dropped else EXHAUSTED, order, work, dropped
        if work > limit:
            return GAVE_UP, order, work, dropped
        bits = 4
        while bits < 2 * children:
            bits *= 2
        table = np.full(bits, -1, np.int64)
        distinct = np.empty(children, np.int64)
        count_distinct = 0
        for c in range(children):
            at = c_key[c] & (bits - 1)
            while table[at] >= 0 and (c_key[table[at]] != c_key[c] or c_live[table[at]] != c_live[c]):
                at = (at + 1) & (bits - 1)
            if table[at] < 0:
                table[at] = c
                distinct[count_distinct] = c
                count_distinct += 1
        distinct = distinct[:count_distinct]
        if count_distinct > width:
            distinct = distinct[np.argsort(c_live[distinct], kind="mergesort")[:width]]
            dropped += count_distinct - width
        heirs = np.zeros(states, np.int64)
        for c in distinct:
            heirs[c_parent[c]] += 1
        for i in range(states):
            if heirs[i] == 0:
                spare[spares] = row[i]
                spares += 1
        states = distinct.shape[0]
        new_row = np.empty(states, np.int64)
        for i in range(states):
            c = distinct[i]
            p, v = c_parent[c], c_move[c]
            r = row[p]
            heirs[p] -= 1
            if heirs[p]:
                spares -= 1
                t = spare[spares]
                waiting[t] = waiting[r]
                left[t] = left[r]
                ready[t, : count[r]] = ready[r, : count[r]]
                count[t] = count[r]
                work += (n + m) // 8
                r = t
            for k in range(touch_ptr[v], touch_ptr[v + 1]):
                left[r, touch[k]] -= 1
            for j in range(count[r]):
                if ready[r, j] == v:
                    count[r] -= 1
                    ready[r, j] = ready[r, count[r]]
                    break
            for k in range(succ_ptr[v], succ_ptr[v + 1]):
                waiting[r, succ[k]] -= 1
                if waiting[r, succ[k]] == 0:
                    ready[r, count[r]] = succ[k]
                    count[r] += 1
            new_row[i] = r
            parents[step, i], moves[step, i] = p, v
        for i in range(states):
            row[i], live[i], key[i] = new_row[i], c_live[distinct[i]], c_key[distinct[i]]
    at = 0
    for step in range(n - 1, -1, -1):
        order[step] = moves[step, at]
        at = parents[step, at]
    return FOUND, order, work, dropped
