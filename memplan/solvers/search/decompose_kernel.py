"""Splits the tree search into independent components and stores failed states, compiled by numba.

A component (called cell in the code) is a part of a piece, by time. No unplaced buffer is alive in two components, so
they are decided one after the other. The table stores states of components that failed. (numba's cache of
`search_kernel.py` does not detect changes in this file: touch that file too.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, inline="always")
def mix(b, allowed, hole):
    """Zobrist key of one unplaced buffer's state; wrapping 64-bit integers on purpose."""
    b, allowed, hole = np.int64(b), np.int64(allowed), np.int64(hole)  # so that plain Python wraps too
    x = (b + 1) * -7046029254386353131 ^ (allowed + 1) * -4417276706812531889 ^ (hole + 2) * 1609587929392839161
    x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@njit(cache=True, inline="always")
def slot(table, key):
    """The index of `key` in the open-addressing table, or the index to store it at (four probes, then the first)."""
    mask = table.shape[0] - 1
    first = key & mask
    for probe in range(4):
        at = (first + probe) & mask
        if table[at] == key or table[at] == 0:
            return at
    return first


@njit(cache=True)
def key_of(lo, hi, salt, buf_lo, placed, allowed, hole):
    """The table's key of the component [lo, hi): the sum over its unplaced buffers."""
    key = np.int64(salt)
    for b in range(buf_lo.shape[0]):
        if not placed[b] and lo <= buf_lo[b] < hi:
            key += mix(b, allowed[b], hole[b])
    return key


@njit(cache=True)
def split(old, cells, owner, cross, placed, buf_lo, c_lo, c_hi, c_next, c_owner, c_count):
    """Split component `old` at boundaries that no unplaced buffer crosses; the parts replace it, smallest first.

    Returns the new number of components, unchanged if there is no such boundary. `owner` is the decision that caused
    the split.
    """
    begin, end = cells, cells
    start = c_lo[old]
    for s in range(c_lo[old], c_hi[old]):
        if s == c_hi[old] - 1 or cross[s] == 0:
            c_lo[end], c_hi[end], c_count[end] = start, s + 1, 0
            end += 1
            start = s + 1
    if end - begin <= 1:
        return cells
    for b in range(buf_lo.shape[0]):
        if not placed[b] and c_lo[old] <= buf_lo[b] < c_hi[old]:
            for q in range(begin, end):
                if buf_lo[b] < c_hi[q]:
                    c_count[q] += 1
                    break
    kept = begin
    for q in range(begin, end):  # insertion sort by count, without the empty ones
        lo, hi, count = c_lo[q], c_hi[q], c_count[q]
        if count == 0:
            continue
        at = kept
        while at > begin and c_count[at - 1] > count:
            c_lo[at], c_hi[at], c_count[at] = c_lo[at - 1], c_hi[at - 1], c_count[at - 1]
            at -= 1
        c_lo[at], c_hi[at], c_count[at] = lo, hi, count
        kept += 1
    if kept - begin <= 1:
        return cells
    for q in range(begin, kept):
        c_next[q], c_owner[q] = q + 1, owner
    c_next[kept - 1] = c_next[old]
    return kept
