"""Squeaky-wheel optimization, for large problems that do not split: repeats first-fit with an improved order.

Buffers are placed by size, weighted by the largest load in their live interval. After each round, buffers above the
goal are promoted in the order (Joslin and Clements, "Squeaky wheel optimization", 1999).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers.arrays.heuristics import PAIRS_PER_UNIT, first_fit, pairs_alive_together, unplaced
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of
from memplan.solvers.limits import WorkBudget

_BUSY, _PROMOTION = 8.0, 1.3  # exponent of the load, factor on the key of a buffer that ended too high
_HIGHEST_KEY = 1e200  # keys grow with every promotion, and would overflow after some thousand rounds
_PAIRS_PER_SECOND = 5_000_000  # speed of first-fit: a round that would not end in time is not started


def rounds(arrays: ProblemArrays, goal: Ints, budget: WorkBudget) -> Iterator[Ints]:
    """Yield a placement (offsets in units) per round until `budget` is over; `goal` has the highest wanted offsets."""
    pairs = pairs_alive_together(arrays)
    free = np.flatnonzero(~arrays.pinned)
    load = load_of(arrays)
    busiest = _highest(load, arrays.lo, arrays.hi) / load.max()
    key = arrays.size * busiest**_BUSY
    while not budget.is_over:
        seconds = budget.remaining_seconds()
        if seconds is not None and pairs > seconds * _PAIRS_PER_SECOND:
            return
        offsets = unplaced(arrays)
        first_fit(arrays, free[np.lexsort((arrays.lo[free], -key[free]))], offsets)
        budget.spend(pairs // PAIRS_PER_UNIT, 1)
        yield offsets
        key = np.where(offsets > goal, key * _PROMOTION, key)
        if key.max() > _HIGHEST_KEY:
            key = key / key.max()


def _highest(value: Ints, lo: Ints, hi: Ints) -> Ints:
    """max(value[lo:hi]) for every range, from the maxima over powers of two. Sections x log in memory."""
    width = np.frexp(hi - lo)[1] - 1  # the largest power of two within each range
    highest = np.zeros(lo.shape[0], np.int64)
    level = value
    for power in range(int(width.max(initial=0)) + 1):
        here = width == power
        highest[here] = np.maximum(level[lo[here]], level[hi[here] - (1 << power)])
        level = np.maximum(level[: -(1 << power)], level[1 << power :])
    return highest
