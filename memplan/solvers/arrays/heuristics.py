"""Heuristics over arrays: the first placements of the portfolio, and the completion of a placement after a search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays
from memplan.solvers.limits import Budget

PAIRS_PER_UNIT = 16  # pairs of buffers visited by first-fit, for one unit of work


def unplaced(core: ProblemArrays) -> Ints:
    """Offsets (units) with only the pinned buffers placed; -1 for all others."""
    return np.where(core.pinned, core.low, -1)


def pairs_alive_together(core: ProblemArrays) -> int:
    """The number of pairs of buffers whose hulls overlap. Linear: sections are small integers."""
    born = np.cumsum(np.bincount(core.lo, minlength=core.sections + 1))
    died = np.cumsum(np.bincount(core.hi, minlength=core.sections + 1))
    return int((born[core.hi - 1] - died[core.lo] - 1).sum()) // 2


def first_fit(core: ProblemArrays, order: Ints, offsets: Ints, *, best: bool = False) -> None:
    """Place the buffers of `order` one by one into `offsets`, each at the lowest (or with `best` tightest) offset."""
    from memplan.solvers.arrays import fit_kernel

    policy = fit_kernel.BEST if best else fit_kernel.FIRST
    if core.n <= thresholds.FEW:
        fit_kernel.fit_few(
            order, policy, core.size, core.align, core.low, core.seg_ptr, core.seg_lo, core.seg_hi, offsets,
        )  # fmt: skip
        return
    fit_kernel.fit(
        order, policy, core.size, core.align, core.low, core.seg_ptr, core.seg_lo, core.seg_hi, core.sections, offsets,
    )  # fmt: skip


def on_skyline(core: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints) -> bool:
    """Place the buffers of `order` on top of the placed ones, up to `max_offset`; returns whether all fit. n log n."""
    from memplan.solvers.arrays import skyline_kernel

    refused = skyline_kernel.on_skyline(
        order, core.size, core.align, core.low, max_offset, core.seg_ptr, core.seg_lo, core.seg_hi, core.sections,
        offsets,
    )  # fmt: skip
    return bool(refused == 0)


def online(core: ProblemArrays, *policies: bool) -> Iterator[Ints]:
    """Yield the offsets (units) that an allocator gives in order of time, for each policy (True: best-fit).

    It does not support pinned buffers.
    """
    from memplan.solvers.arrays import skyline_kernel

    births = np.lexsort((-core.size, core.start))
    deaths = np.argsort(core.hi)  # the order of equal deaths does not matter: all are freed before the next birth
    for best in policies:
        offsets = np.full(core.n, -1, np.int64)
        skyline_kernel.online(births, deaths, core.lo, core.hi, core.size, core.align, core.low, best, offsets)
        yield offsets


def first_answers(core: ProblemArrays) -> Iterator[Ints]:
    """Yield complete, valid placements (offsets in units), the fastest to compute first."""
    free = np.flatnonzero(~core.pinned)
    if pairs_alive_together(core) <= thresholds.PAIRS or core.pinned.any():
        life = core.hi - core.lo
        for key in (core.size, core.size * life, life):
            for best in (False, True):
                offsets = unplaced(core)
                first_fit(core, free[np.lexsort((core.lo[free], -key[free]))], offsets, best=best)
                yield offsets
    else:
        yield from online(core, False, True)


def fill(core: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints, budget: Budget | None = None) -> Ints:
    """Complete `offsets` with the buffers of `order`; returns those above `max_offset` (none for peeled buffers).

    The skyline is tried first, then first-fit, whose work is spent from `budget` in proportion to the pairs visited.
    """
    on_top = offsets.copy()
    on_skyline(core, order, max_offset, on_top)
    refused = order[on_top[order] < 0]
    pairs = pairs_alive_together(core) if len(refused) else 0
    if budget is not None:
        budget.spend(len(refused) * 2 * pairs // max(core.n, 1) // PAIRS_PER_UNIT, 1)
    first_fit(core, refused, on_top)
    if (on_top <= max_offset).all():
        offsets[:] = on_top
        return refused[:0]
    if pairs > 10 * thresholds.PAIRS:  # first-fit for all of them would take seconds
        offsets[:] = on_top
        return np.flatnonzero(offsets > max_offset)
    first_fit(core, order, offsets)
    if (on_top > max_offset).sum() < (offsets > max_offset).sum():
        offsets[:] = on_top
    return np.flatnonzero(offsets > max_offset)
