"""Heuristics over arrays: the first placements of the portfolio, and the completion of a placement after a search.

Large problems that do not split get squeaky-wheel optimization: first-fit is repeated with an improved order. Buffers
are placed by size, weighted by the largest load in their live interval. After each round, buffers above the goal are
promoted in the order (Joslin and Clements, "Squeaky wheel optimization", 1999).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, ProblemArrays, load_of
from memplan.solvers.base import WorkBudget

_PAIRS_PER_UNIT = 16  # pairs of buffers visited by first-fit with the segment tree, for one unit of work
_SCANNED_PER_UNIT = 6_000  # placed buffers scanned by first-fit in the order of offsets, for one unit of work


def unplaced(arrays: ProblemArrays) -> Ints:
    """Offsets (units) with only the pinned buffers placed; -1 for all others."""
    return np.where(arrays.pinned, arrays.low, -1)


def pairs_alive_together(arrays: ProblemArrays) -> int:
    """The number of pairs of buffers whose hulls overlap. Linear: sections are small integers."""
    born = np.cumsum(np.bincount(arrays.lo, minlength=arrays.sections + 1))
    died = np.cumsum(np.bincount(arrays.hi, minlength=arrays.sections + 1))
    return int((born[arrays.hi - 1] - died[arrays.lo] - 1).sum()) // 2


def first_fit_work(arrays: ProblemArrays) -> int:
    """The units of work in which `first_fit` places all buffers."""
    if _is_scanned(arrays):
        return arrays.n * arrays.n // _SCANNED_PER_UNIT
    return pairs_alive_together(arrays) // _PAIRS_PER_UNIT


def _is_scanned(arrays: ProblemArrays) -> bool:
    """Whether scanning all placed buffers is faster than finding those alive together in the segment tree."""
    if arrays.n <= thresholds.FEW:
        return True
    return arrays.n * arrays.n <= thresholds.SCANNED * pairs_alive_together(arrays)


def first_fit(arrays: ProblemArrays, order: Ints, offsets: Ints, *, best: bool = False) -> None:
    """Place the buffers of `order` one by one into `offsets`, each at the lowest (or with `best` tightest) offset."""
    from memplan.solvers import fit_kernel

    policy = fit_kernel.BEST if best else fit_kernel.FIRST
    if _is_scanned(arrays):
        fit_kernel.fit_few(
            order, policy, arrays.size, arrays.align, arrays.low, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi, offsets,
        )  # fmt: skip
        return
    fit_kernel.fit(
        order, policy, arrays.size, arrays.align, arrays.low, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi,
        arrays.sections, offsets,
    )  # fmt: skip


def on_skyline(arrays: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints) -> bool:
    """Place the buffers of `order` on top of the placed ones, up to `max_offset`; returns whether all fit. n log n."""
    from memplan.solvers import skyline_kernel

    refused = skyline_kernel.on_skyline(
        order, arrays.size, arrays.align, arrays.low, max_offset, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi,
        arrays.sections, offsets,
    )  # fmt: skip
    return bool(refused == 0)


def online(arrays: ProblemArrays, *policies: bool) -> Iterator[Ints]:
    """Yield the offsets (units) that an allocator gives in order of time, for each policy (True: best-fit).

    It does not support pinned buffers.
    """
    from memplan.solvers import skyline_kernel

    births = np.lexsort((-arrays.size, arrays.start))
    deaths = np.argsort(arrays.hi)  # the order of equal deaths does not matter: all are freed before the next birth
    for best in policies:
        offsets = np.full(arrays.n, -1, np.int64)
        skyline_kernel.online(
            births, deaths, arrays.lo, arrays.hi, arrays.size, arrays.align, arrays.low, best, offsets
        )
        yield offsets


def first_answers(arrays: ProblemArrays) -> Iterator[Ints]:
    """Yield complete, valid placements (offsets in units), the fastest to compute first."""
    free = np.flatnonzero(~arrays.pinned)
    if pairs_alive_together(arrays) <= thresholds.PAIRS or arrays.pinned.any():
        life = arrays.hi - arrays.lo
        for key in (arrays.size, arrays.size * life, life):
            for best in (False, True):
                offsets = unplaced(arrays)
                first_fit(arrays, free[np.lexsort((arrays.lo[free], -key[free]))], offsets, best=best)
                yield offsets
    else:
        yield from online(arrays, False, True)


def fill(arrays: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints, budget: WorkBudget | None = None) -> Ints:
    """Complete `offsets` with the buffers of `order`; returns those above `max_offset` (none for peeled buffers).

    The skyline is tried first, then first-fit, whose work is spent from `budget`.
    """
    on_top = offsets.copy()
    on_skyline(arrays, order, max_offset, on_top)
    refused = order[on_top[order] < 0]
    work = first_fit_work(arrays) if len(refused) else 0
    if budget is not None:
        budget.spend(len(refused) * work // max(arrays.n, 1), 1)
    first_fit(arrays, refused, on_top)
    if (on_top <= max_offset).all():
        offsets[:] = on_top
        return refused[:0]
    if work > thresholds.ROUND:
        offsets[:] = on_top
        return np.flatnonzero(offsets > max_offset)
    first_fit(arrays, order, offsets)
    if (on_top > max_offset).sum() < (offsets > max_offset).sum():
        offsets[:] = on_top
    return np.flatnonzero(offsets > max_offset)


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
