"""Ejection search, compiled by numba: extends a partial placement by ejecting the buffers that overlap a new one.

The placed buffers are a valid placement at all times. `eject.py` describes the method and its source. Offsets and sizes
are in units.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

_NEVER = np.int64(1) << 62


@njit(cache=True, inline="always")
def _draw(state, below):
    """A random number in [0, below), from a 64-bit linear congruential generator (Knuth's MMIX)."""
    state[0] = state[0] * 6364136223846793005 + 1442695040888963407
    return ((state[0] >> 33) & 0x7FFFFFFF) % below


@njit(cache=True, inline="always")
def _first(end, count, order, key):
    """The index of the first key that is at least `end`, in the first `count` entries of `order`, sorted by `key`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if key[order[middle]] < end:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _take_out(b, end, count, order, key):
    """Remove `b`, whose key is `end`, from the first `count` entries of `order`, sorted by `key`."""
    low = _first(end, count, order, key)
    while order[low] != b:
        low += 1
    for k in range(low, count - 1):
        order[k] = order[k + 1]


@njit(cache=True)
def _put_in(b, end, count, order, key):
    low = _first(end, count, order, key)
    for k in range(count, low, -1):
        order[k] = order[k - 1]
    order[low] = b


@njit(cache=True, inline="always")
def _one_more(chosen, seen, first, last, state):
    """One step of reservoir sampling: `chosen` of `seen` offsets, after adding one or both ends of a range."""
    seen += 1
    if _draw(state, seen) == 0:
        chosen = first
    if first < last:
        seen += 1
        if _draw(state, seen) == 0:
            chosen = last
    return chosen, seen


@njit(cache=True)
def _free_place(b, size, align, low, maxoff, meets, by_bottom, count, bottom, top, state):
    """An offset at which `b` overlaps no placed buffer: a random end of a free range; -1 if there is none."""
    chosen, seen, at, step = -1, 0, low[b], align[b]
    for k in range(count + 1):
        y = by_bottom[k] if k < count else -1
        if y >= 0 and not meets[b, y]:
            continue
        last = min(bottom[y] - size[b], maxoff[b]) if y >= 0 else maxoff[b]
        first = -(-at // step) * step
        last = last // step * step
        if first <= last:
            chosen, seen = _one_more(chosen, seen, first, last, state)
        if y >= 0 and top[y] > at:
            at = top[y]
            if at > maxoff[b]:
                break
    return chosen


@njit(cache=True)
def _cheapest_place(b, size, align, low, maxoff, meets, penalty, by_bottom, by_top, count, bottom, top, state):
    """The offset at which the buffers that overlap `b` have the smallest total penalty, random among equals, and that
    penalty; -1 and a very large one if there is none.

    The penalty changes where the top of `b` passes a bottom and where its bottom passes a top; both are sorted.
    """
    best, chosen, seen, step = _NEVER, np.int64(-1), 0, align[b]
    weight, at, i, j = np.int64(0), low[b], 0, 0
    while at <= maxoff[b]:
        while i < count and bottom[by_bottom[i]] - size[b] < at:  # the top of b reaches these
            if meets[b, by_bottom[i]]:
                weight += penalty[by_bottom[i]]
            i += 1
        while j < count and top[by_top[j]] <= at:  # the bottom of b has passed these
            if meets[b, by_top[j]]:
                weight -= penalty[by_top[j]]
            j += 1
        after = maxoff[b] + 1  # the weight is the same in [at, after)
        k = i
        while k < count and bottom[by_bottom[k]] - size[b] + 1 < after:
            if meets[b, by_bottom[k]]:
                after = bottom[by_bottom[k]] - size[b] + 1
                break
            k += 1
        k = j
        while k < count and top[by_top[k]] < after:
            if meets[b, by_top[k]]:
                after = top[by_top[k]]
                break
            k += 1
        first, last = -(-at // step) * step, (after - 1) // step * step
        if first <= last and weight <= best:
            if weight < best:
                best, chosen, seen = weight, first, 0
            chosen, seen = _one_more(chosen, seen, first, last, state)
        at = after
    return chosen, best


@njit(cache=True, nogil=True)
def eject(
    size, align, low, maxoff, adj_ptr, adj, area, turns, moves, penalty, offsets, state,
):  # fmt: skip
    """Place all buffers, or give up after `turns` insertions; returns the insertions and the smallest unplaced area.

    `offsets` (-1 for unplaced), `penalty` (the cost of ejecting each buffer) and `state` (of the random generator) are
    updated in place, so that the next call continues where this one ends.
    """
    n = size.shape[0]
    meets = np.zeros((n, n), np.bool_)
    for b in range(n):
        for k in range(adj_ptr[b], adj_ptr[b + 1]):
            meets[b, adj[k]] = True
    bottom, top = offsets, np.where(offsets < 0, -1, offsets + size)
    waiting = np.flatnonzero(offsets < 0)
    waits = waiting.shape[0]
    waiting = np.concatenate((waiting, np.zeros(n - waits, np.int64)))
    by_bottom, by_top = np.argsort(bottom), np.argsort(top)
    count = np.int64(n - waits)
    by_bottom[:count], by_top[:count] = by_bottom[waits:].copy(), by_top[waits:].copy()
    left = np.int64(0)
    for k in range(waits):
        left += area[waiting[k]]
    least = left
    for turn in range(turns):
        if waits == 0:
            return turn, 0
        # Usually the newest one, which is the hardest to place; with probability 1/4 any one.
        k = waits - 1 if _draw(state, 4) else _draw(state, waits)
        b = waiting[k]
        waits -= 1
        waiting[k] = waiting[waits]
        left -= area[b]
        at, weight = _cheapest_place(
            b, size, align, low, maxoff, meets, penalty, by_bottom, by_top, count, bottom, top, state
        )
        end = at + size[b]
        if weight > 0:
            penalty[b] += area[b]
            for k in range(adj_ptr[b], adj_ptr[b + 1]):
                y = adj[k]
                if bottom[y] >= 0 and bottom[y] < end and top[y] > at:
                    _take_out(y, bottom[y], count, by_bottom, bottom)
                    _take_out(y, top[y], count, by_top, top)
                    count -= 1
                    bottom[y] = top[y] = -1
                    waiting[waits] = y
                    waits += 1
                    left += area[y]
        _put_in(b, at, count, by_bottom, bottom)
        _put_in(b, end, count, by_top, top)
        bottom[b], top[b] = at, end
        count += 1
        least = min(least, left)
        if weight == 0:
            continue
        for _ in range(moves):  # moving neighbours merges small holes
            y = np.int64(adj[adj_ptr[b] + _draw(state, adj_ptr[b + 1] - adj_ptr[b])])
            if bottom[y] < 0:
                continue
            _take_out(y, bottom[y], count, by_bottom, bottom)
            _take_out(y, top[y], count, by_top, top)
            at = _free_place(y, size, align, low, maxoff, meets, by_bottom, count - 1, bottom, top, state)
            _put_in(y, at, count - 1, by_bottom, bottom)
            _put_in(y, at + size[y], count - 1, by_top, top)
            bottom[y], top[y] = at, at + size[y]
    return turns, least
