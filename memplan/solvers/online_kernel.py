"""Places buffers as an allocator would, in order of time, compiled by numba."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit


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
