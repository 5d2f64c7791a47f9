"""Joins buffers into one, compiled by numba. `join.py` gives the reasons; read it first.

Linked lists hold the buffers that end and that start at each boundary between sections; joins update them. (numba's
cache does not detect changes in `decompose_kernel.py`: touch this file too.)
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.solvers.search.decompose_kernel import mix

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
def _sums(first, following, size, sums):
    """Store the total size of every subset of a list in `sums`, the whole list last.

    Returns the number of subsets, or 0 if the list is too long.
    """
    sums[0], count, b = 0, 1, first
    while b >= 0:
        if 2 * count > sums.shape[0]:
            return 0
        for i in range(count):
            sums[count + i] = sums[i] + size[b]
        count, b = 2 * count, following[b]
    return count


@njit(cache=True)
def _is_block(k, dying, dying_next, born, born_next, size, most):
    """Return whether no proper subset of the buffers ending at `k` has the total size of one of those starting."""
    one, two = np.empty(1 << most, np.int64), np.empty(1 << most, np.int64)
    parts = _sums(dying[k], dying_next, size, one)
    others = _sums(born[k], born_next, size, two)
    for i in range(1, parts - 1):
        for j in range(1, others - 1):
            if one[i] == two[j]:
                return False
    return parts > 0 and others > 0


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
    k, exact, chance, seed, dying, dying_next, born, born_next, size, hi, low, ceiling, up
):  # fmt: skip
    """Join buffers that end at `k` with buffers of the same size that start there; returns whether any were joined."""
    alone = dying_next[dying[k]] < 0 and born_next[born[k]] < 0
    moved, a = False, dying[k]
    while a >= 0:
        following, b = dying_next[a], np.int64(-1)
        if alone or chance:
            b = _partner(a, k, dying, dying_next, born, born_next, size, low)
        if b >= 0 and ((exact and alone) or (mix(a, b, seed) & (CERTAIN - 1)) < chance):
            moved = True
            up[b], hi[a], ceiling[a] = a, hi[b], min(ceiling[a], ceiling[b])
            _remove(dying, dying_next, k, a)
            _remove(born, born_next, k, b)
            _remove(dying, dying_next, hi[a], b)
            dying_next[a], dying[hi[a]] = dying[hi[a]], a
        a = following
    return moved


@njit(cache=True)
def _side_by_side(k, exact, chance, seed, first, following, other, other_next, end, size, low, ceiling, up, above):
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
    if not exact and (mix(a, b, seed) & (CERTAIN - 1)) >= chance:
        return False
    while b >= 0:
        up[b], above[b] = a, size[a]
        size[a] += size[b]
        _remove(other, other_next, end[b], b)
        b = following[b]
    following[a] = -1
    return True


@njit(cache=True)
def join(size, lo, hi, seg_ptr, seg_lo, seg_hi, free, low, ceiling, load, capacity, loose, chance, seed, most):
    """Join buffers; returns (up, above, lo, hi, size, ceiling).

    `up` is the buffer that contains each buffer (-1 for none) and `above` its distance above that one's bottom; the
    others are the new values of the buffers that no other contains. Only `free` buffers are joined. Without `loose`,
    only certain joins are made, which every placement in `capacity` (above `low`) must have; with it, likely ones too,
    each with a probability of `chance` / CERTAIN. A block has at most `most` buffers.
    """
    n, sections = size.shape[0], load.shape[0]
    lo, hi, size, ceiling = lo.copy(), hi.copy(), size.copy(), ceiling.copy()
    up, above = np.full(n, -1, np.int64), np.zeros(n, np.int64)
    born, dying = np.full(sections + 1, -1, np.int64), np.full(sections + 1, -1, np.int64)
    born_next, dying_next = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    fixed = np.zeros(sections + 1, np.bool_)  # a buffer that is not free ends or starts there
    for b in range(n - 1, -1, -1):
        if free[b]:
            born_next[b], born[lo[b]] = born[lo[b]], b
            dying_next[b], dying[hi[b]] = dying[hi[b]], b
        else:
            for k in range(seg_ptr[b], seg_ptr[b + 1]):
                fixed[seg_lo[k]], fixed[seg_hi[k]] = True, True
    moved = True
    while moved:
        moved = False
        for k in range(1, sections):
            exact = load[k - 1] == capacity and load[k] == capacity and not fixed[k]
            if not (exact or loose) or dying[k] < 0 or born[k] < 0:
                continue
            moved |= _one_after_the_other(
                k, exact, chance * loose, seed, dying, dying_next, born, born_next, size, hi, low, ceiling, up
            )  # fmt: skip
            if dying[k] < 0 or born[k] < 0:
                continue
            exact = exact and _is_block(k, dying, dying_next, born, born_next, size, most)
            moved |= _side_by_side(
                k, exact, chance * loose, seed, dying, dying_next, born, born_next, lo, size, low, ceiling, up, above
            )  # fmt: skip
            moved |= _side_by_side(
                k, exact, chance * loose, seed, born, born_next, dying, dying_next, hi, size, low, ceiling, up, above
            )  # fmt: skip
    return up, above, lo, hi, size, ceiling
