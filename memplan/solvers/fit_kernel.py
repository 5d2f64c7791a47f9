"""Places buffers one by one, compiled by numba: each at the first (or best) offset that is free in its live interval.

A segment tree over the sections finds the placed buffers that are alive together with a buffer: every live interval is
stored at the O(log sections) nodes that cover it, so memory is about linear for any lengths. For few buffers, a
linear scan in the order of offsets is faster. Both give the same placement.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

FIRST, BEST = 0, 1


@njit(cache=True)
def _hang(b, lo, hi, base, head, link, owner, used):
    """Store the interval [lo, hi) of `b` at the tree nodes that cover it; returns the new number of entries."""
    left, right = lo + base, hi + base
    while left < right:
        if left & 1:
            link[used], owner[used], head[left] = head[left], b, used
            used += 1
            left += 1
        if right & 1:
            right -= 1
            link[used], owner[used], head[right] = head[right], b, used
            used += 1
        left >>= 1
        right >>= 1
    # Mark the ancestors: an entry is stored below them.
    for leaf in (lo + base, hi - 1 + base):
        node = leaf
        while node >= 1:
            head[node + 2 * base] = 1
            node >>= 1
    return used


@njit(cache=True)
def _take(node, head, link, owner, stamp, mark, met, count):
    entry = head[node]
    while entry >= 0:
        b = owner[entry]
        if stamp[b] != mark:
            stamp[b] = mark
            met[count] = b
            count += 1
        entry = link[entry]
    return count


@njit(cache=True)
def _meet(lo, hi, base, head, link, owner, stamp, mark, met, count, stack):
    """Append to `met` the placed buffers alive somewhere in [lo, hi); returns their number."""
    left, right = lo + base, hi + base
    for side in (left, right - 1):  # entries at the ancestors of the range
        node = side >> 1
        while node >= 1:
            count = _take(node, head, link, owner, stamp, mark, met, count)
            node >>= 1
    while left < right:  # the canonical nodes of the range, and all below them
        for turn in range(2):
            if turn == 0 and left & 1:
                node = left
                left += 1
            elif turn == 1 and right & 1:
                right -= 1
                node = right
            else:
                continue
            stack[0], depth = node, 1
            while depth:
                depth -= 1
                node = stack[depth]
                if head[node + 2 * base] != 1:
                    continue
                count = _take(node, head, link, owner, stamp, mark, met, count)
                if node < base:
                    stack[depth], stack[depth + 1] = 2 * node, 2 * node + 1
                    depth += 2
        left >>= 1
        right >>= 1
    return count


@njit(cache=True)
def _hole(size, align, low, policy, bottoms, order, tops):
    """The lowest (FIRST) or tightest (BEST) aligned offset between the ranges [bottoms, tops), sorted by `order`."""
    at = -(-low // align) * align
    best, best_room = -1, 0
    for k in range(order.shape[0]):
        i = order[k]
        if bottoms[i] >= at + size:
            if policy == FIRST:
                return at
            room = bottoms[i] - at
            if best < 0 or room < best_room:
                best, best_room = at, room
        if tops[i] > at:
            at = -(-tops[i] // align) * align
    return best if best >= 0 else at


@njit(cache=True, nogil=True)
def fit(order, policy, size, align, low, seg_ptr, seg_lo, seg_hi, sections, offsets):
    """Place the buffers of `order`, in that order, into `offsets`. Buffers with an offset of 0 or more are placed."""
    n = size.shape[0]
    base = 1
    while base < sections:
        base *= 2
    head = np.full(4 * base, -1, np.int64)  # second half: is an entry stored at or below the node?
    room = 16
    for b in range(n):
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            length = seg_hi[k] - seg_lo[k]
            room += 2
            while length > 1:
                room += 2
                length >>= 1
    link = np.empty(room, np.int64)
    owner = np.empty(room, np.int64)
    stamp = np.full(n, -1, np.int64)
    met = np.empty(n, np.int64)
    stack = np.empty(256, np.int64)
    used = np.int64(0)  # not 0: `_hang` would be compiled twice
    for b in range(n):
        if offsets[b] >= 0:
            for k in range(seg_ptr[b], seg_ptr[b + 1]):
                used = _hang(b, seg_lo[k], seg_hi[k], base, head, link, owner, used)
    for turn in range(order.shape[0]):
        b = order[turn]
        count = np.int64(0)
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            count = _meet(seg_lo[k], seg_hi[k], base, head, link, owner, stamp, turn, met, count, stack)
        bottoms = offsets[met[:count]]
        tops = bottoms + size[met[:count]]
        offsets[b] = _hole(size[b], align[b], low[b], policy, bottoms, np.argsort(bottoms), tops)
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            used = _hang(b, seg_lo[k], seg_hi[k], base, head, link, owner, used)


@njit(cache=True)
def _insert(b, birth, death, offsets, size, who, births, deaths, bottoms, tops, count):
    """Insert `b` into the lists sorted by bottom, after all buffers with the same bottom."""
    bottom = offsets[b]
    at = count
    while at > 0 and bottoms[at - 1] > bottom:
        who[at], births[at], deaths[at], tops[at] = who[at - 1], births[at - 1], deaths[at - 1], tops[at - 1]
        bottoms[at] = bottoms[at - 1]
        at -= 1
    who[at], births[at], deaths[at], bottoms[at], tops[at] = b, birth, death, bottom, bottom + size[b]


@njit(cache=True)
def _meets(b, c, seg_ptr, seg_lo, seg_hi):
    """Return whether two buffers whose hulls overlap are alive together."""
    if seg_ptr[b + 1] - seg_ptr[b] == 1 and seg_ptr[c + 1] - seg_ptr[c] == 1:
        return True
    for k in range(seg_ptr[b], seg_ptr[b + 1]):
        for m in range(seg_ptr[c], seg_ptr[c + 1]):
            if seg_lo[k] < seg_hi[m] and seg_lo[m] < seg_hi[k]:
                return True
    return False


@njit(cache=True, nogil=True)
def fit_few(order, policy, size, align, low, seg_ptr, seg_lo, seg_hi, offsets):
    """Place buffers as `fit` does, by linear scans: quadratic in the number of buffers."""
    n = size.shape[0]
    who, births, deaths = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    bottoms, tops = np.empty(n, np.int64), np.empty(n, np.int64)
    placed = np.flatnonzero(offsets >= 0)
    placed = placed[np.argsort(offsets[placed], kind="mergesort")]
    count = placed.shape[0]
    for k in range(count):
        b = placed[k]
        who[k], births[k], deaths[k] = b, seg_lo[seg_ptr[b]], seg_hi[seg_ptr[b + 1] - 1]
        bottoms[k], tops[k] = offsets[b], offsets[b] + size[b]
    for turn in range(order.shape[0]):
        b = order[turn]
        birth, death = seg_lo[seg_ptr[b]], seg_hi[seg_ptr[b + 1] - 1]
        at = -(-low[b] // align[b]) * align[b]
        best, best_room = np.int64(-1), np.int64(0)
        for k in range(count):
            if births[k] < death and birth < deaths[k]:
                if tops[k] <= at or not _meets(b, who[k], seg_ptr, seg_lo, seg_hi):
                    continue
                room = bottoms[k] - at
                if room >= size[b] and (best < 0 or room < best_room):
                    best, best_room = at, room
                    if policy == FIRST:
                        break
                at = -(-tops[k] // align[b]) * align[b]
        offsets[b] = best if best >= 0 else at
        _insert(b, birth, death, offsets, size, who, births, deaths, bottoms, tops, count)
        count += 1


@njit(cache=True, nogil=True)
def neighbours(n, seg_ptr, seg_lo, seg_hi, lo, hi, by_start):
    """The buffers alive together with each buffer: (pointers, neighbours by start). `by_start` sorts by `lo`."""
    degree = np.zeros(n + 1, np.int64)
    ptr = degree
    for sweep in range(2):
        if sweep == 1:
            ptr = np.zeros(n + 1, np.int64)
            for b in range(n):
                ptr[b + 1] = ptr[b] + degree[b]
            adj = np.empty(ptr[n], np.int32)
            degree[:] = 0
        for i in range(n):
            b = by_start[i]
            for j in range(i + 1, n):
                c = by_start[j]
                if lo[c] >= hi[b]:
                    break
                if _meets(b, c, seg_ptr, seg_lo, seg_hi):
                    if sweep == 1:
                        adj[ptr[b] + degree[b]] = c
                        adj[ptr[c] + degree[c]] = b
                    degree[b] += 1
                    degree[c] += 1
    return ptr, adj


@njit(cache=True, nogil=True)
def members(sections, seg_ptr, seg_lo, seg_hi):
    """The buffers that are alive in each section: (pointers, buffers)."""
    ptr = np.zeros(sections + 1, np.int64)
    for k in range(seg_lo.shape[0]):
        for s in range(seg_lo[k], seg_hi[k]):
            ptr[s + 1] += 1
    for s in range(sections):
        ptr[s + 1] += ptr[s]
    mem = np.empty(ptr[sections], np.int32)
    fill = ptr[:-1].copy()
    for b in range(seg_ptr.shape[0] - 1):
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            for s in range(seg_lo[k], seg_hi[k]):
                mem[fill[s]] = b
                fill[s] += 1
    return ptr, mem
