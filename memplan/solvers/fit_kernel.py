"""Places buffers one by one, compiled by numba: each at the first offset that is free in its live interval.

Placed buffers are scanned in the order of their offsets: quadratic in the number of buffers, some billions a second.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit


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
def fit(placed, order, size, align, low, seg_ptr, seg_lo, seg_hi, offsets):
    """Place the buffers of `order`, in that order, into `offsets`. Those of `placed`, by their offsets, are placed."""
    n = size.shape[0]
    who, births, deaths = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    bottoms, tops = np.empty(n, np.int64), np.empty(n, np.int64)
    count = placed.shape[0]
    for k in range(count):
        b = placed[k]
        who[k], births[k], deaths[k] = b, seg_lo[seg_ptr[b]], seg_hi[seg_ptr[b + 1] - 1]
        bottoms[k], tops[k] = offsets[b], offsets[b] + size[b]
    for turn in range(order.shape[0]):
        b = order[turn]
        birth, death = seg_lo[seg_ptr[b]], seg_hi[seg_ptr[b + 1] - 1]
        at = -(-low[b] // align[b]) * align[b]
        for k in range(count):
            if births[k] < death and birth < deaths[k]:
                if tops[k] <= at or not _meets(b, who[k], seg_ptr, seg_lo, seg_hi):
                    continue
                if bottoms[k] - at >= size[b]:
                    break
                at = -(-tops[k] // align[b]) * align[b]
        offsets[b] = at
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
