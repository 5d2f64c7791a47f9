"""Selects the next decision of the tree search, compiled by numba: first a section, then a buffer in it.

The speed of the search depends on this branching rule. It selects a section in which few buffers can still be at the
bottom ("fewest candidates first"), weighted by how often the section proved a dead end; if no section has few
candidates, the one with the most unplaced bytes. In it, the rule selects the lowest buffer; among equals, one that fits
into its corner. A table stores the states that failed. (numba's cache of `search_kernel.py` does not detect changes in
this file: touch that file too.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, inline="always")
def can_block(y, c, hole_c, allowed, size, maxoff):
    """Return whether the unplaced buffer `y` can still take some of the bytes that `c` would have taken at its hole."""
    return allowed[y] < hole_c + size[c] and maxoff[y] + size[y] > hole_c and allowed[y] + size[y] <= maxoff[c]


@njit(cache=True)
def pick_section(few, capacity, reach, unplaced, weight, placed, mem_ptr, mem):
    """The section for the next decision; -1 if none has an unplaced buffer.

    A section has few candidates if fewer than `few` buffers can be at its bottom; with `few` = 1, no section has.
    """
    best, best_key, best_tie = -1, 0, 0
    for s in range(unplaced.shape[0]):
        if unplaced[s] == 0:
            continue
        highest = capacity - unplaced[s]  # some unplaced buffer must be at or below this offset
        count = 0
        for k in range(mem_ptr[s], mem_ptr[s + 1]):
            if reach[mem[k]] <= highest and not placed[mem[k]]:
                count += 1
                if count == few:
                    break
        key, tie = (few - count) * (1 + weight[s]), unplaced[s]
        if best < 0 or key > best_key or (key == best_key and tie > best_tie):
            best, best_key, best_tie = s, key, tie
    return best


@njit(cache=True)
def _descend(b, reach, allowed, hole, size, maxoff, rank, placed, adj_ptr, adj):
    """The buffer that must be decided before `b`, or `b` itself; -1 if there is no end to the chain.

    That is a buffer that fits wholly below it, or, if it is skipped at its lowest offset, one that can block it there.
    """
    for _ in range(2 * size.shape[0]):
        stale = hole[b] == allowed[b]
        best = -1
        for k in range(adj_ptr[b], adj_ptr[b + 1]):
            y = adj[k]
            if placed[y]:
                continue
            if stale:
                if hole[y] == allowed[y] or not can_block(y, b, hole[b], reach, size, maxoff):
                    continue
            elif reach[y] + size[y] > allowed[b]:
                continue
            if best < 0 or allowed[y] < allowed[best] or (allowed[y] == allowed[best] and rank[y] < rank[best]):
                best = y
        if best < 0:
            return -1 if stale else b
        b = best
    return -1


@njit(cache=True, inline="always")
def _fit(b, allowed, size, floor, buf_lo, buf_hi):
    """A score of how well `b` fits into the corner at its lowest offset: higher floors at its sides, equal tops."""
    score = 0
    at, top = allowed[b], allowed[b] + size[b]
    lo, hi = buf_lo[b], buf_hi[b]
    if lo == 0 or floor[lo - 1] > at:
        score += 2
    if hi == floor.shape[0] or floor[hi] > at:
        score += 2
    if lo > 0 and floor[lo - 1] == top:
        score += 1
    if hi < floor.shape[0] and floor[hi] == top:
        score += 1
    return score


@njit(cache=True)
def pick_buffer(
    section, corners, reach, allowed, hole, size, maxoff, rank, placed, floor, adj_ptr, adj, mem_ptr, mem,
    buf_lo, buf_hi,
):  # fmt: skip
    """The buffer of the next decision, or -1 if every unplaced buffer of the piece is skipped at its lowest offset."""
    best, score = np.int64(-1), 0  # a literal would make numba compile `_descend` twice
    for k in range(mem_ptr[section], mem_ptr[section + 1]):
        b = mem[k]
        if placed[b]:
            continue
        if best >= 0 and allowed[b] > allowed[best]:
            continue
        own = 0
        if corners:
            own = _fit(b, allowed, size, floor, buf_lo, buf_hi)
        if best < 0 or allowed[b] < allowed[best] or own > score or (own == score and rank[b] < rank[best]):
            best, score = b, own
    best = _descend(best, reach, allowed, hole, size, maxoff, rank, placed, adj_ptr, adj)
    if best >= 0:
        return best
    # Fallback: the lowest buffer of the piece that is not skipped; nothing unplaced can end up under it.
    for b in range(size.shape[0]):
        if placed[b] or hole[b] == allowed[b]:
            continue
        if best < 0 or allowed[b] < allowed[best] or (allowed[b] == allowed[best] and rank[b] < rank[best]):
            best = b
    return best


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
def key_of(placed, allowed, hole):
    """The table's key of a state: the sum over its unplaced buffers."""
    key = np.int64(1)
    for b in range(placed.shape[0]):
        if not placed[b]:
            key += mix(b, allowed[b], hole[b])
    return key
