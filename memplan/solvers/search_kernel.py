"""The place-or-skip tree search, compiled by numba. `tree_search.py` calls it; read that first.

The state of every unplaced buffer is its lowest open offset (`allowed`, the highest top of its placed neighbours) and
the offset at which it was skipped (`hole`). If a placement exists, then one exists in which no buffer can move to a
lower free offset. So the hole of a skipped buffer must be blocked by a neighbour that is still unplaced, and a buffer
that no other can block is never skipped. The search is therefore complete with two branches per node: place the chosen
buffer at `allowed`, or skip it there.

All offsets and sizes are in units, all live intervals in sections (see `arrays.py`).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.solvers.branch_kernel import can_block, key_of, mix, pick_buffer, pick_section, slot

SOLVED, EXHAUSTED, LIMIT = 0, 1, 2

_PLACED, _ALLOWED, _HOLE, _FLOOR, _REACH = range(5)  # kinds of trail entries


@njit(cache=True)
def _undo(
    mark, tp, trail, reach, allowed, hole, floor, placed, unplaced, size, seg_ptr, seg_lo, seg_hi
):  # fmt: skip
    """Undo the trail entries from `mark` to `tp`, newest first."""
    while tp > mark:
        tp -= 1
        kind, i, old = trail[tp, 0], trail[tp, 1], trail[tp, 2]
        if kind == _ALLOWED:
            allowed[i] = old
        elif kind == _REACH:
            reach[i] = old
        elif kind == _FLOOR:
            floor[i] = old
        elif kind == _HOLE:
            hole[i] = old
        else:
            placed[i] = False
            for k in range(seg_ptr[i], seg_ptr[i + 1]):
                for s in range(seg_lo[k], seg_hi[k]):
                    unplaced[s] += size[i]


@njit(cache=True)
def _propagate(
    capacity, unplaced, hole, reach, latest, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi, weight, changed,
    trail, tp, rounds,
):  # fmt: skip
    """Raise `reach` (the lowest possible offset) of skipped buffers, and check the sections that changed.

    A skipped buffer ends up on top of one that can still block its hole; that is found in `rounds`. In a section with U
    units unplaced, some buffer must be at `capacity` - U or below. A section that proves a dead end gains `weight`.
    Returns (consistent, tp); `changed` is all False afterwards.
    """
    for _ in range(rounds):
        moved = False
        for b in range(size.shape[0]):
            if hole[b] < 0 or placed[b]:
                continue
            lowest = capacity
            for k in range(adj_ptr[b], adj_ptr[b + 1]):
                y = adj[k]
                if not placed[y] and reach[y] + size[y] < lowest and can_block(y, b, hole[b], reach, size, latest):
                    lowest = reach[y] + size[y]
            if lowest > latest[b]:
                for s in range(buf_lo[b], buf_hi[b]):
                    weight[s] += 1
                changed[:] = False
                return False, tp
            if lowest > reach[b] and tp < trail.shape[0]:
                trail[tp, 0], trail[tp, 1], trail[tp, 2] = _REACH, b, reach[b]
                tp += 1
                reach[b] = lowest
                changed[buf_lo[b] : buf_hi[b]] = True
                moved = True
        if not moved:
            break
    consistent = True
    for s in range(unplaced.shape[0]):
        if not changed[s] or unplaced[s] == 0:
            continue
        consistent = False
        for k in range(mem_ptr[s], mem_ptr[s + 1]):
            if not placed[mem[k]] and reach[mem[k]] <= capacity - unplaced[s]:
                consistent = True
                break
        if not consistent:
            weight[s] += 1
            break
    changed[:] = False
    return consistent, tp


@njit(cache=True)
def _grow(array):
    bigger = np.empty((2 * array.shape[0], array.shape[1]), array.dtype)
    for i in range(array.shape[0]):
        for k in range(array.shape[1]):  # a slice takes longer to compile
            bigger[i, k] = array[i, k]
    return bigger


@njit(cache=True, nogil=True)
def search(
    capacity, size, align, low, maxoff, seg_ptr, seg_lo, seg_hi, sections, adj_ptr, adj, mem_ptr, mem, rank, few,
    corners, node_limit, room, rounds, table, offsets,
):  # fmt: skip
    """Place all buffers under `capacity`, prove that no placement exists, or give up after `node_limit` nodes.

    Returns (SOLVED | EXHAUSTED | LIMIT, nodes, smallest unplaced area in units x sections). `few` and `corners` are
    those of the branching rule (`branch_kernel.py`), whose ties `rank` breaks. `room`: the trail
    entries per buffer that one propagation may add; `rounds`: of a propagation. `offsets` receives the placement;
    `table` stores failed states between calls.
    """
    n = size.shape[0]
    allowed = low.copy()
    hole = np.full(n, -1, np.int64)
    reach = low.copy()  # the lowest possible offset of each buffer
    changed = np.zeros(sections, np.bool_)
    weight = np.zeros(sections, np.int64)  # how often each section proved a dead end in this call
    placed = np.zeros(n, np.bool_)
    buf_lo = np.empty(n, np.int64)
    buf_hi = np.empty(n, np.int64)
    area_of = np.zeros(n, np.int64)
    floor = np.zeros(sections, np.int64)
    unplaced = np.zeros(sections, np.int64)
    area = 0
    for b in range(n):
        buf_lo[b], buf_hi[b] = seg_lo[seg_ptr[b]], seg_hi[seg_ptr[b + 1] - 1]
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            area_of[b] += size[b] * (seg_hi[k] - seg_lo[k])
            for s in range(seg_lo[k], seg_hi[k]):
                unplaced[s] += size[b]
        area += area_of[b]
    best_area = area

    depth = 6 * n + 64
    f_buffer = np.empty(depth, np.int64)
    f_phase = np.empty(depth, np.int64)
    f_mark = np.empty(depth, np.int64)
    f_left = np.empty(depth, np.int64)
    f_hash = np.empty(depth, np.int64)
    f_area = np.empty(depth, np.int64)
    fp = 0
    trail = np.empty((64 * (n + 16), 3), np.int64)
    # np.int64(0), not 0: numba would compile the functions below a second time for the literal.
    tp = np.int64(0)

    left = n
    key = key_of(placed, allowed, hole)
    for b in range(n):
        if allowed[b] > maxoff[b]:
            return EXHAUSTED, 0, area
    for s in range(sections):
        if unplaced[s] > capacity:
            return EXHAUSTED, 0, area
    nodes = 0
    failed = False
    while True:
        if not failed:
            if left == 0:
                return SOLVED, nodes, 0
            nodes += 1
            if nodes > node_limit or fp >= depth - 1:
                return LIMIT, nodes, best_area
            chosen = -1
            if table[slot(table, key)] != key:
                s = pick_section(few, capacity, reach, unplaced, weight, placed, mem_ptr, mem)
                lowest = capacity
                for k in range(mem_ptr[s], mem_ptr[s + 1]):
                    if not placed[mem[k]] and allowed[mem[k]] < lowest:
                        lowest = allowed[mem[k]]
                if lowest + unplaced[s] <= capacity:
                    chosen = pick_buffer(
                        s, corners, reach, allowed, hole, size, maxoff, rank, placed, floor,
                        adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi,
                    )  # fmt: skip
            if chosen < 0:
                failed = True
                continue
            b = chosen
            f_buffer[fp], f_phase[fp], f_mark[fp] = b, 0, tp
            f_left[fp], f_hash[fp], f_area[fp] = left, key, area
            fp += 1
            # Left branch: place b at its lowest open offset.
            offset = allowed[b]
            top = offset + size[b]
            placed[b] = True
            offsets[b] = offset
            need = adj_ptr[b + 1] - adj_ptr[b] + buf_hi[b] - buf_lo[b] + 4
            while tp + 3 * need + room * n > trail.shape[0]:
                trail = _grow(trail)
            trail[tp, 0], trail[tp, 1], trail[tp, 2] = _PLACED, b, 0
            tp += 1
            left -= 1
            area -= area_of[b]
            key -= mix(b, allowed[b], hole[b])
            for k in range(seg_ptr[b], seg_ptr[b + 1]):
                for s in range(seg_lo[k], seg_hi[k]):
                    unplaced[s] -= size[b]
                    trail[tp, 0], trail[tp, 1], trail[tp, 2] = _FLOOR, s, floor[s]
                    tp += 1
                    floor[s] = top
                    changed[s] = True
                    if unplaced[s] > 0 and top + unplaced[s] > capacity:
                        failed = True
                        weight[s] += 1
            failed |= offset > maxoff[b]
            if not failed:
                for k in range(adj_ptr[b], adj_ptr[b + 1]):
                    c = adj[k]
                    blocks = hole[c] >= 0 and offset < hole[c] + size[c] and top > hole[c]
                    if placed[c] or (allowed[c] >= top and not blocks):
                        continue
                    key -= mix(c, allowed[c], hole[c])
                    if blocks:
                        trail[tp, 0], trail[tp, 1], trail[tp, 2] = _HOLE, c, hole[c]
                        tp += 1
                        hole[c] = -1
                    if allowed[c] >= top:  # another neighbour, above the hole, keeps it higher
                        key += mix(c, allowed[c], hole[c])
                        continue
                    trail[tp, 0], trail[tp, 1], trail[tp, 2] = _ALLOWED, c, allowed[c]
                    tp += 1
                    allowed[c] = top if align[c] == 1 else -(-top // align[c]) * align[c]
                    key += mix(c, allowed[c], hole[c])
                    if reach[c] < allowed[c]:
                        trail[tp, 0], trail[tp, 1], trail[tp, 2] = _REACH, c, reach[c]
                        tp += 1
                        reach[c] = allowed[c]
                        changed[buf_lo[c] : buf_hi[c]] = True
                    if allowed[c] > maxoff[c]:
                        failed = True
                        break
            if failed:
                changed[:] = False
            else:
                consistent, tp = _propagate(
                    capacity, unplaced, hole, reach, maxoff, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi,
                    weight, changed, trail, tp, rounds,
                )  # fmt: skip
                failed = not consistent
            if not failed and area < best_area:
                best_area = area
            continue
        # Failed: undo to the newest frame and try its other branch.
        if fp == 0:
            return EXHAUSTED, nodes, best_area
        f = fp - 1
        _undo(
            f_mark[f], tp, trail, reach, allowed, hole, floor, placed, unplaced, size, seg_ptr, seg_lo, seg_hi
        )  # fmt: skip
        tp = f_mark[f]
        b, left, key, area = f_buffer[f], f_left[f], f_hash[f], f_area[f]
        if f_phase[f] == 0:
            f_phase[f] = 1
            trail[tp, 0], trail[tp, 1], trail[tp, 2] = _HOLE, b, hole[b]
            tp += 1
            key -= mix(b, allowed[b], hole[b])
            hole[b] = allowed[b]
            key += mix(b, allowed[b], hole[b])
            changed[buf_lo[b] : buf_hi[b]] = True
            consistent, tp = _propagate(
                capacity, unplaced, hole, reach, maxoff, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi,
                weight, changed, trail, tp, rounds,
            )  # fmt: skip
            failed = not consistent
        if failed:
            table[slot(table, f_hash[f])] = f_hash[f]
            fp = f
