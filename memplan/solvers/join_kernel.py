"""Joins buffers into one, compiled by numba. `tree_search.py` gives the reasons; read it first.

Linked lists hold the buffers that end and that start at each boundary between sections; joins update them. (numba's
cache does not detect changes in `branch_kernel.py`: touch this file too.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.solvers.branch_kernel import mix

CERTAIN = 1024  # the probability 1


@njit(cache=True)
def _remove(first, following, k, b):
    """Remove `b` from the list that begins at first[k]."""
    if first[k] == b:
        first[k] = following[b]
        return
    at = first[k]
    while following[at] != b:
        at = following[at]
    following[at] = following[b]


@njit(cache=True)
def _partner(a, k, dying, dying_next, born, born_next, size, low):
    """The only buffer of the size of `a` that starts at `k`, if `a` is the only one of its size to end there; or -1."""
    found, b = np.int64(-1), dying[k]
    while b >= 0:
        if size[b] == size[a] and b != a:
            return found
        b = dying_next[b]
    b = born[k]
    while b >= 0:
        if size[b] == size[a]:
            if found >= 0:
                return np.int64(-1)
            found = np.int64(b)
        b = born_next[b]
    return found if found >= 0 and low[found] == low[a] else np.int64(-1)


@njit(cache=True)
def _one_after_the_other(
    k, chance, seed, dying, dying_next, born, born_next, size, hi, low, ceiling, up
):  # fmt: skip
    """Join buffers that end at `k` with buffers of the same size that start there; returns whether any were joined."""
    moved, a = False, dying[k]
    while a >= 0:
        following = dying_next[a]
        b = _partner(a, k, dying, dying_next, born, born_next, size, low)
        if b >= 0 and (mix(a, b, seed) & (CERTAIN - 1)) < chance:
            moved = True
            up[b], hi[a], ceiling[a] = a, hi[b], min(ceiling[a], ceiling[b])
            _remove(dying, dying_next, k, a)
            _remove(born, born_next, k, b)
            _remove(dying, dying_next, hi[a], b)
            dying_next[a], dying[hi[a]] = dying[hi[a]], a
        a = following
    return moved


@njit(cache=True)
def _side_by_side(k, chance, seed, first, following, other, other_next, end, size, low, ceiling, up, above):
    """Join all buffers of a list if they also share their other `end`; returns whether they were joined."""
    a = first[k]
    b = following[a]
    if b < 0:
        return False
    while b >= 0:
        if end[b] != end[a] or ceiling[b] != ceiling[a] or low[b] != low[a]:
            return False
        b = following[b]
    b = following[a]
    if (mix(a, b, seed) & (CERTAIN - 1)) >= chance:
        return False
    while b >= 0:
        up[b], above[b] = a, size[a]
        size[a] += size[b]
        _remove(other, other_next, end[b], b)
        b = following[b]
    following[a] = -1
    return True


@njit(cache=True)
def join(size, lo, hi, sections, free, low, ceiling, chance, seed):
    """Join buffers; returns (up, above, lo, hi, size, ceiling).

    `up` is the buffer that contains each buffer (-1 for none) and `above` its distance above that one's bottom; the
    others are the new values of the buffers that no other contains. Only `free` buffers are joined, each with a
    probability of `chance` / CERTAIN.
    """
    n = size.shape[0]
    lo, hi, size, ceiling = lo.copy(), hi.copy(), size.copy(), ceiling.copy()
    up, above = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    born, dying = np.full(sections + 1, -1, np.int64), np.full(sections + 1, -1, np.int64)
    born_next, dying_next = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    for b in range(n - 1, -1, -1):
        if free[b]:
            born_next[b], born[lo[b]] = born[lo[b]], b
            dying_next[b], dying[hi[b]] = dying[hi[b]], b
    moved = True
    while moved:
        moved = False
        for k in range(1, sections):
            if dying[k] < 0 or born[k] < 0:
                continue
            moved |= _one_after_the_other(
                k, chance, seed, dying, dying_next, born, born_next, size, hi, low, ceiling, up
            )  # fmt: skip
            if dying[k] < 0 or born[k] < 0:
                continue
            moved |= _side_by_side(
                k, chance, seed, dying, dying_next, born, born_next, lo, size, low, ceiling, up, above
            )  # fmt: skip
            moved |= _side_by_side(
                k, chance, seed, born, born_next, dying, dying_next, hi, size, low, ceiling, up, above
            )  # fmt: skip
    return up, above, lo, hi, size, ceiling
