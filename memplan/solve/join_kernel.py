"""Which buffers are joined to one, compiled by numba. `join.py` says why; read that first."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,assignment"
from __future__ import annotations

import numpy as np
from numba import njit

_MOST = 6  # buffers that die, or are born, at a boundary whose subset sums are compared


@njit(cache=True)
def _remove(first, following, k, b):
    """Take `b` out of the list that begins at first[k]."""
    if first[k] == b:
        first[k] = following[b]
        return
    at = first[k]
    while following[at] != b:
        at = following[at]
    following[at] = following[b]


@njit(cache=True)
def _is_block(k, dying, dying_next, born, born_next, size):
    """Does no part of what dies at `k` take the bytes of a part of what is born there (all of it aside)?"""
    one, two = np.empty(_MOST, np.int64), np.empty(_MOST, np.int64)
    na, nb = 0, 0
    b = dying[k]
    while b >= 0:
        if na == _MOST:
            return False
        one[na] = size[b]
        na += 1
        b = dying_next[b]
    b = born[k]
    while b >= 0:
        if nb == _MOST:
            return False
        two[nb] = size[b]
        nb += 1
        b = born_next[b]
    for m in range(1, (1 << na) - 1):
        total = 0
        for i in range(na):
            if (m >> i) & 1:
                total += one[i]
        for q in range(1, (1 << nb) - 1):
            other = 0
            for j in range(nb):
                if (q >> j) & 1:
                    other += two[j]
            if other == total:
                return False
    return True


@njit(cache=True)
def _stack(k, first, following, other, other_next, keys, size, ceiling, low, delta, up):
    """Join all of a list to one buffer, if they are alive at the same time; returns whether it did."""
    a = first[k]
    b = following[a]
    while b >= 0:
        if keys[b] != keys[a] or ceiling[b] != ceiling[a] or low[b] != low[a]:
            return False
        b = following[b]
    b = following[a]
    while b >= 0:
        nxt = following[b]
        up[b], delta[b] = a, size[a]
        size[a] += size[b]
        _remove(other, other_next, keys[b], b)
        b = nxt
    following[a] = -1
    return True


@njit(cache=True)
def join(
    size, lo, hi, seg_ptr, seg_lo, seg_hi, free, low, ceiling, load, capacity, loose, chance, state
):
    """Join buffers; returns (up, delta, lo, hi, size, ceiling): of each the one that it lies in, how far above
    its bottom, and, of those that lie in none (up < 0), what they have become.

    With `loose`, equal sizes are enough, each join being made with `chance` (of 1024).
    """
    n, sections = size.shape[0], load.shape[0]
    lo, hi, size, ceiling = lo.copy(), hi.copy(), size.copy(), ceiling.copy()
    up, delta = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    born, dying = np.full(sections + 1, -1, np.int64), np.full(sections + 1, -1, np.int64)
    born_next, dying_next = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    fixed = np.zeros(sections + 1, np.bool_)  # something that is not free ends or begins there
    for b in range(n - 1, -1, -1):
        if free[b]:
            born_next[b], born[lo[b]] = born[lo[b]], b
            dying_next[b], dying[hi[b]] = dying[hi[b]], b
        else:
            for k in range(seg_ptr[b], seg_ptr[b + 1]):
                fixed[seg_lo[k]], fixed[seg_hi[k]] = True, True
    refused = np.zeros(n, np.bool_)
    moved = True
    while moved:
        moved = False
        for k in range(1, sections):
            if dying[k] < 0 or born[k] < 0:
                continue
            tight = load[k - 1] == capacity and load[k] == capacity and not fixed[k]
            if not (tight or loose):
                continue
            alone = dying_next[dying[k]] < 0 and born_next[born[k]] < 0
            a = dying[k]
            while a >= 0:
                nxt = dying_next[a]
                c, match, twins = born[k], np.int64(-1), 0
                while c >= 0:
                    if size[c] == size[a]:
                        match = c
                        twins += 1
                    c = born_next[c]
                e = dying[k]
                while e >= 0:
                    twins += size[e] == size[a] and e != a
                    e = dying_next[e]
                if twins == 1 and match >= 0 and low[a] == low[match] and (loose or alone) and not refused[match]:
                    take = tight and alone
                    if not take:
                        state[0] = state[0] * 6364136223846793005 + 1442695040888963407
                        take = ((state[0] >> 33) & 1023) < chance
                        refused[match] = not take
                    if take:
                        moved = True
                        _remove(dying, dying_next, k, a)
                        _remove(born, born_next, k, match)
                        # `a` takes the place of `match` where that dies.
                        _remove(dying, dying_next, hi[match], match)
                        hi[a] = hi[match]
                        dying_next[a], dying[hi[a]] = dying[hi[a]], a
                        ceiling[a] = min(ceiling[a], ceiling[match])
                        up[match] = a
                a = nxt
            if dying[k] < 0 or born[k] < 0:
                continue
            if not (tight or loose):
                continue
            if dying_next[dying[k]] >= 0 and (loose or _is_block(k, dying, dying_next, born, born_next, size)):
                moved |= _stack(k, dying, dying_next, born, born_next, lo, size, ceiling, low, delta, up)
            if born_next[born[k]] >= 0 and (loose or _is_block(k, dying, dying_next, born, born_next, size)):
                moved |= _stack(k, born, born_next, dying, dying_next, hi, size, ceiling, low, delta, up)
    return up, delta, lo, hi, size, ceiling
