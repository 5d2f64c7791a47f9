"""Propagates the decisions of the tree search to the possible offsets of unplaced buffers, compiled by numba.

Every unplaced buffer has two bounds, `reach` (its lowest possible offset) and `latest` (its highest). They hold under
the decisions taken, and are undone with them. There are four rules:

- a skipped buffer ends up on top of one that can still block its hole;
- in a section with U units unplaced under capacity C, some buffer must be at C - U or below. If only one can be, it
  is, and the others are above it;
- no buffer of the section starts at an offset t below which too much would stay unfilled: t - (units that can end at t
  or below) > C - U;
- of two buffers that are alive together, one is above the other; if only one order is possible, it is enforced.

The first rule and "some buffer must" are cheap and always applied. With all rules, the search needs about a third of
the nodes, each of which takes up to four times as long. The third is the "not first" rule of disjunctive scheduling
(Carlier, Pinson: "An algorithm for solving the job-shop problem", 1989), for every place in the order. (numba's cache
of `search_kernel.py` does not detect changes in this file: touch that file too.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.solvers.search.branch_kernel import can_block

REACH, LATEST = 4, 5  # kinds of trail entries
FEW, ALL = 1, 2  # what to check again in a section: the lowest buffers; all offsets


@njit(cache=True, inline="always")
def _raise(b, value, reach, changed, buf_lo, buf_hi, trail, tp):
    trail[tp, 0], trail[tp, 1], trail[tp, 2] = REACH, b, reach[b]
    reach[b] = value
    for s in range(buf_lo[b], buf_hi[b]):
        changed[s] |= ALL
    return tp + 1


@njit(cache=True)
def _lower(b, value, reach, latest, size, placed, adj_ptr, adj, changed, buf_lo, buf_hi, trail, tp, queue):
    """Lower `latest[b]` to `value` and enforce the orders of pairs that follow; returns (consistent, tp)."""
    trail[tp, 0], trail[tp, 1], trail[tp, 2] = LATEST, b, latest[b]
    tp += 1
    latest[b] = value
    queue[0], count = b, 1
    while count:
        count -= 1
        x = queue[count]
        if reach[x] > latest[x]:
            return False, tp
        for k in range(adj_ptr[x], adj_ptr[x + 1]):
            y = adj[k]
            if placed[y] or tp + 2 > trail.shape[0]:
                continue
            end = reach[x] + size[x]
            if reach[y] + size[y] > latest[x] and reach[y] < end:  # x is below y
                if end > latest[y]:
                    return False, tp
                tp = _raise(y, end, reach, changed, buf_lo, buf_hi, trail, tp)
            elif end > latest[y] and latest[y] > latest[x] - size[y]:  # y is below x
                trail[tp, 0], trail[tp, 1], trail[tp, 2] = LATEST, y, latest[y]
                tp += 1
                latest[y] = latest[x] - size[y]
                if reach[y] > latest[y]:
                    return False, tp
                if count < queue.shape[0]:
                    queue[count] = y
                    count += 1
    return True, tp


@njit(cache=True)
def _forbid(s, highest, reach, latest, size, placed, mem_ptr, mem, changed, buf_lo, buf_hi, trail, tp, ends):
    """Raise the buffers of section `s` that start at offsets below which too much would stay unfilled.

    Only offsets below the `ends` lowest ends are checked; above, nearly every offset is possible. Returns (consistent,
    whether a buffer was raised, tp).
    """
    last, moved = np.int64(-1), False
    for _ in range(ends):
        below, end = 0, np.int64(1) << 62
        for k in range(mem_ptr[s], mem_ptr[s + 1]):
            b = mem[k]
            if not placed[b]:
                top = reach[b] + size[b]
                if top <= last:
                    below += size[b]
                elif top < end:
                    end = top
        first = max(highest + below + 1, last)  # no buffer begins in [first, end)
        last = end
        if first >= end:
            continue
        for k in range(mem_ptr[s], mem_ptr[s + 1]):
            b = mem[k]
            if not placed[b] and first <= reach[b] < end:
                if end > latest[b]:
                    return False, moved, tp
                if tp < trail.shape[0]:
                    tp = _raise(b, end, reach, changed, buf_lo, buf_hi, trail, tp)
                    moved = True
    return True, moved, tp


@njit(cache=True)
def _skipped(
    capacity, hole, reach, latest, size, placed, adj_ptr, adj, buf_lo, buf_hi, weight, changed, trail, tp, rounds
):  # fmt: skip
    """Raise every skipped buffer to the top of one that can block its hole; returns (consistent, tp)."""
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
                return False, tp
            if lowest > reach[b] and tp < trail.shape[0]:
                tp = _raise(b, lowest, reach, changed, buf_lo, buf_hi, trail, tp)
                moved = True
        if not moved:
            break
    return True, tp


@njit(cache=True)
def _sections(
    thorough, capacity, unplaced, reach, latest, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi, weight,
    changed, trail, tp, queue, ends, rounds,
):  # fmt: skip
    """Apply the rules of sections to every section that changed; returns (consistent, tp)."""
    for _ in range(rounds):
        moved = False
        for s in range(unplaced.shape[0]):
            starts = thorough and changed[s] >= ALL
            if changed[s] == 0:
                continue
            changed[s] = 0
            if unplaced[s] == 0:
                continue
            highest = capacity - unplaced[s]
            lowest, candidates, others = np.int64(-1), 0, 0
            for k in range(mem_ptr[s], mem_ptr[s + 1]):
                b = mem[k]
                if placed[b]:
                    continue
                if reach[b] > highest:
                    others += 1
                    continue
                lowest = np.int64(b)
                candidates += 1
                if not thorough or (candidates == 2 and not starts):
                    break
            consistent, more = candidates > 0, False
            if starts and others and candidates:
                consistent, more, tp = _forbid(
                    s, highest, reach, latest, size, placed, mem_ptr, mem, changed, buf_lo, buf_hi, trail, tp, ends
                )  # fmt: skip
            if thorough and consistent and candidates == 1 and latest[lowest] > highest and tp < trail.shape[0]:
                more = True
                consistent, tp = _lower(
                    lowest, highest, reach, latest, size, placed, adj_ptr, adj, changed, buf_lo, buf_hi, trail, tp,
                    queue,
                )  # fmt: skip
            moved |= more
            if not consistent:
                weight[s] += 1
                return False, tp
        if not moved:
            break
    return True, tp


@njit(cache=True)
def propagate(
    thorough, capacity, unplaced, hole, reach, latest, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi,
    weight, changed, trail, tp, queue, ends, rounds,
):  # fmt: skip
    """Apply all rules (if `thorough`) or the cheap ones to everything that changed; returns (consistent, tp).

    `changed` says what to check again in each section (0, FEW or ALL) and is all 0 afterwards. A section that proves a
    dead end gains `weight`. `queue` is scratch space of one number per buffer; `ends` and `rounds` are limits.
    """
    consistent, tp = _skipped(
        capacity, hole, reach, latest, size, placed, adj_ptr, adj, buf_lo, buf_hi, weight, changed, trail, tp, rounds
    )  # fmt: skip
    if consistent:
        consistent, tp = _sections(
            thorough, capacity, unplaced, reach, latest, size, placed, adj_ptr, adj, mem_ptr, mem, buf_lo, buf_hi,
            weight, changed, trail, tp, queue, ends, rounds,
        )  # fmt: skip
    changed[:] = 0
    return consistent, tp
