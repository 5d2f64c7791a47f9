"""Places buffers in n log n, compiled by numba: on the skyline, and as an allocator would, in order of time."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def _top(lo, hi, base, highest, whole):
    """The highest top over the sections [lo, hi). `whole[v]` holds for all of node v, `highest[v]` for a part of it."""
    left, right = lo + base, hi + base
    best = 0
    for side in (left, right - 1):
        node = side
        while node >= 1:
            best = max(best, whole[node])
            node >>= 1
    while left < right:
        if left & 1:
            best = max(best, highest[left])
            left += 1
        if right & 1:
            right -= 1
            best = max(best, highest[right])
        left >>= 1
        right >>= 1
    return best


@njit(cache=True)
def _raise(lo, hi, top, base, highest, whole):
    left, right = lo + base, hi + base
    while left < right:
        if left & 1:
            whole[left] = max(whole[left], top)
            highest[left] = max(highest[left], top)
            left += 1
        if right & 1:
            right -= 1
            whole[right] = max(whole[right], top)
            highest[right] = max(highest[right], top)
        left >>= 1
        right >>= 1
    for leaf in (lo + base, hi - 1 + base):
        node = leaf >> 1
        while node >= 1:
            highest[node] = max(highest[node], highest[2 * node], highest[2 * node + 1])
            node >>= 1


@njit(cache=True, nogil=True)
def on_skyline(order, size, align, low, max_offset, seg_ptr, seg_lo, seg_hi, sections, offsets):
    """Place each buffer of `order` on top of all placed buffers in its live interval, if `max_offset` allows it.

    Buffers whose offset in `offsets` is not negative are placed already. Returns the number of buffers not placed.
    """
    base = 1
    while base < sections:
        base *= 2
    highest = np.zeros(2 * base, np.int64)
    whole = np.zeros(2 * base, np.int64)
    for b in range(size.shape[0]):
        if offsets[b] >= 0:
            for k in range(seg_ptr[b], seg_ptr[b + 1]):
                _raise(seg_lo[k], seg_hi[k], offsets[b] + size[b], base, highest, whole)
    refused = 0
    for turn in range(order.shape[0]):
        b = order[turn]
        at = low[b]
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            at = max(at, _top(seg_lo[k], seg_hi[k], base, highest, whole))
        at = -(-at // align[b]) * align[b]
        if at > max_offset[b]:
            refused += 1
            continue
        offsets[b] = at
        for k in range(seg_ptr[b], seg_ptr[b + 1]):
            _raise(seg_lo[k], seg_hi[k], at + size[b], base, highest, whole)
    return refused


@njit(cache=True, nogil=True)
def online(births, deaths, lo, hi, size, align, low, best_fit, offsets):
    """Place buffers as an allocator does: allocate at birth, at `low` or above, and free at death.

    `births` and `deaths` are the buffers in order of birth and of death.
    """
    n = size.shape[0]
    hole_at = np.empty(n + 2, np.int64)
    hole_end = np.empty(n + 2, np.int64)
    hole_at[0], hole_end[0], holes = 0, np.int64(1) << 62, 1
    died = 0
    for turn in range(n):
        b = births[turn]
        while died < n and hi[deaths[died]] <= lo[b]:
            holes = _free(offsets[deaths[died]], size[deaths[died]], hole_at, hole_end, holes)
            died += 1
        chosen, room = -1, 0
        for k in range(holes):
            at = -(-max(hole_at[k], low[b]) // align[b]) * align[b]
            left = hole_end[k] - at - size[b]
            if left >= 0 and (chosen < 0 or left < room):
                chosen, room = k, left
                if not best_fit:
                    break
        at = -(-max(hole_at[chosen], low[b]) // align[b]) * align[b]
        offsets[b] = at
        end = hole_end[chosen]
        keep_low, keep_high = hole_at[chosen] < at, at + size[b] < end
        if keep_low and keep_high:
            for k in range(holes, chosen + 1, -1):
                hole_at[k], hole_end[k] = hole_at[k - 1], hole_end[k - 1]
            holes += 1
            hole_end[chosen], hole_at[chosen + 1], hole_end[chosen + 1] = at, at + size[b], end
        elif keep_low:
            hole_end[chosen] = at
        elif keep_high:
            hole_at[chosen] = at + size[b]
        else:
            holes -= 1
            for k in range(chosen, holes):
                hole_at[k], hole_end[k] = hole_at[k + 1], hole_end[k + 1]


@njit(cache=True)
def _free(at, size, hole_at, hole_end, holes):
    """Free [at, at + size) and merge it with adjacent holes; returns the number of holes."""
    k = np.searchsorted(hole_at[:holes], at)
    joins_low = k > 0 and hole_end[k - 1] == at
    joins_high = k < holes and hole_at[k] == at + size
    if joins_low and joins_high:
        hole_end[k - 1] = hole_end[k]
        for i in range(k, holes - 1):
            hole_at[i], hole_end[i] = hole_at[i + 1], hole_end[i + 1]
        return holes - 1
    if joins_low:
        hole_end[k - 1] = at + size
        return holes
    if joins_high:
        hole_at[k] = at
        return holes
    for i in range(holes, k, -1):
        hole_at[i], hole_end[i] = hole_at[i - 1], hole_end[i - 1]
    hole_at[k], hole_end[k] = at, at + size
    return holes + 1
