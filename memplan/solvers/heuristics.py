"""Heuristics over arrays: the first placements of the portfolio, and the completion of a placement after a search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, ProblemArrays
from memplan.solvers.base import WorkBudget

_SCANNED_PER_UNIT = 6_000  # placed buffers scanned by first-fit in the order of offsets, for one unit of work


def unplaced(arrays: ProblemArrays) -> Ints:
    """Offsets (units) with only the pinned buffers placed; -1 for all others."""
    return np.where(arrays.pinned, arrays.low, -1)


def first_fit_work(arrays: ProblemArrays) -> int:
    """The units of work in which `first_fit` places all buffers."""
    return arrays.n * arrays.n // _SCANNED_PER_UNIT


def first_fit(arrays: ProblemArrays, order: Ints, offsets: Ints) -> None:
    """Place the buffers of `order` one by one into `offsets`, each at the lowest offset."""
    from memplan.solvers import fit_kernel

    placed = np.flatnonzero(offsets >= 0)
    placed = placed[np.argsort(offsets[placed], kind="stable")]  # not in the kernel: that takes a second to compile
    segments = arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi
    fit_kernel.fit(placed, order, arrays.size, arrays.align, arrays.low, *segments, offsets)


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
    if arrays.n <= thresholds.MANY or arrays.pinned.any():
        life = arrays.hi - arrays.lo
        for key in (arrays.size, arrays.size * life, life):
            offsets = unplaced(arrays)
            first_fit(arrays, free[np.lexsort((arrays.lo[free], -key[free]))], offsets)
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
