"""Squeaky-wheel optimization, for large problems that do not split: repeats first-fit with an improved order.

Buffers are placed by size, weighted by the largest load in their live interval. After each round, buffers above the
goal are promoted in the order (Joslin and Clements, "Squeaky wheel optimization", 1999).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers.arrays.heuristics import first_fit, first_fit_work, unplaced
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of
from memplan.solvers.limits import WorkBudget

_BUSY, _PROMOTION = 8.0, 1.3  # exponent of the load, factor on the key of a buffer that ended too high
_HIGHEST_KEY = 1e200  # keys grow with every promotion, and would overflow after some thousand rounds
_WORK_PER_SECOND = 250_000  # units: a round that would not end in time is not started


class SqueakyWheel:
    """The order in which first-fit places the buffers of a problem; every round improves it."""

    def __init__(self, arrays: ProblemArrays, goal: Ints) -> None:
        """Start with the order by size and load. `goal` has the highest wanted offset of each buffer (units)."""
        load = load_of(arrays)
        self._arrays, self._goal = arrays, goal
        self._key = arrays.size * (_highest(load, arrays.lo, arrays.hi) / load.max()) ** _BUSY
        self._work = first_fit_work(arrays)

    def round(self, placed: Ints, budget: WorkBudget) -> Ints:
        """Place the buffers whose offset in `placed` (units) is negative, and promote those above the goal.

        Returns the offsets of all buffers; `placed` is unchanged.
        """
        arrays, offsets = self._arrays, placed.copy()
        free = np.flatnonzero(placed < 0)
        first_fit(arrays, free[np.lexsort((arrays.lo[free], -self._key[free]))], offsets)
        budget.spend(self._work, 1)
        self._key = np.where(offsets > self._goal, self._key * _PROMOTION, self._key)
        if self._key.max() > _HIGHEST_KEY:
            self._key = self._key / self._key.max()
        return offsets

    def has_time(self, budget: WorkBudget) -> bool:
        """Whether another round would end within the time that is left."""
        seconds = budget.remaining_seconds()
        return not budget.is_over and (seconds is None or self._work <= seconds * _WORK_PER_SECOND)


def rounds(arrays: ProblemArrays, goal: Ints, budget: WorkBudget) -> Iterator[Ints]:
    """Yield a placement (offsets in units) per round until `budget` is over; `goal` has the highest wanted offsets."""
    wheel = SqueakyWheel(arrays, goal)
    while wheel.has_time(budget):
        yield wheel.round(unplaced(arrays), budget)


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
