"""Heuristics over arrays: the first placements of the portfolio, and the completion of a placement after a search.

They are plain numpy, some microseconds for each buffer: a usual model is placed before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, ProblemArrays, meets
from memplan.solvers.base import WorkBudget

_SCANNED_PER_UNIT = 600  # placed buffers scanned by first-fit in the order of offsets, for one unit of work


def unplaced(arrays: ProblemArrays) -> Ints:
    """Offsets (units) with only the pinned buffers placed; -1 for all others."""
    return np.where(arrays.pinned, arrays.low, -1)


def first_fit_work(arrays: ProblemArrays) -> int:
    """The units of work in which `first_fit` places all buffers."""
    return arrays.n * arrays.n // _SCANNED_PER_UNIT


def first_fit(arrays: ProblemArrays, order: Ints, offsets: Ints) -> None:
    """Place the buffers of `order` one by one into `offsets`, each at the first offset that is free in its life.

    Quadratic in the number of buffers.
    """
    placed = np.flatnonzero(offsets >= 0)
    count = len(placed)
    who, bottoms = np.empty(arrays.n, np.int64), np.empty(arrays.n, np.int64)  # the placed buffers, by offset
    who[:count] = placed[np.argsort(offsets[placed], kind="stable")]
    bottoms[:count] = offsets[who[:count]]
    for b in order.tolist():
        near = who[:count][meets(arrays, b)[who[:count]]]
        low = offsets[near]
        tops = np.maximum.accumulate(np.concatenate((arrays.low[b : b + 1], low + arrays.size[near])))
        at = -(-tops // arrays.align[b]) * arrays.align[b]  # above the neighbours so far, before each and at the end
        free = np.append(low - at[:-1] >= arrays.size[b], True)
        offsets[b] = at[free.argmax()]
        place = int(bottoms[:count].searchsorted(offsets[b], side="right"))
        for row, value in ((who, b), (bottoms, offsets[b])):
            row[place + 1 : count + 1] = row[place:count]
            row[place] = value
        count += 1


def lowest_first(arrays: ProblemArrays, key: Ints) -> Ints:
    """Return the offsets if the buffer that can lie lowest is placed next, above all placed ones that it meets.

    Of those that can lie equally low, the one with the largest `key` is next. Quadratic in the number of buffers.
    """
    offsets, lowest = unplaced(arrays), -(-arrays.low // arrays.align) * arrays.align
    left = np.flatnonzero(~arrays.pinned)
    left = left[np.lexsort((arrays.lo[left], -key[left]))]

    def place(b: int, offset: int) -> None:
        offsets[b], above = offset, -(-(offset + arrays.size[b]) // arrays.align) * arrays.align
        np.maximum(lowest, above, out=lowest, where=meets(arrays, b))

    for b in np.flatnonzero(arrays.pinned).tolist():
        place(b, int(arrays.low[b]))
    while len(left):
        at = lowest[left].argmin()
        place(int(left[at]), int(lowest[left[at]]))
        left = np.delete(left, at)
    return offsets


def on_skyline(arrays: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints) -> bool:
    """Place the buffers of `order` on top of the placed ones, up to `max_offset`; returns whether all fit."""
    height = np.zeros(arrays.sections, np.int64)

    def lives(b: int) -> list[Ints]:
        return [height[arrays.seg_lo[k] : arrays.seg_hi[k]] for k in range(arrays.seg_ptr[b], arrays.seg_ptr[b + 1])]

    for b in np.flatnonzero(offsets >= 0).tolist():
        for life in lives(b):
            np.maximum(life, offsets[b] + arrays.size[b], out=life)
    fit = True
    for b in order.tolist():
        at = max(int(arrays.low[b]), *(int(life.max()) for life in lives(b)))
        at = -(-at // int(arrays.align[b])) * int(arrays.align[b])
        if at > max_offset[b]:
            fit = False
            continue
        offsets[b] = at
        for life in lives(b):
            life[:] = at + arrays.size[b]
    return fit


def online(arrays: ProblemArrays, *policies: bool) -> Iterator[Ints]:
    """Yield the offsets (units) that an allocator gives in order of time, for each policy (True: best-fit).

    It does not support pinned buffers.
    """
    from memplan.solvers import online_kernel

    births = np.lexsort((-arrays.size, arrays.start))
    deaths = np.argsort(arrays.hi)  # the order of equal deaths does not matter: all are freed before the next birth
    for best in policies:
        offsets = np.full(arrays.n, -1, np.int64)
        online_kernel.online(births, deaths, arrays.lo, arrays.hi, arrays.size, arrays.align, arrays.low, best, offsets)
        yield offsets


def first_answers(arrays: ProblemArrays) -> Iterator[Ints]:
    """Yield complete, valid placements (offsets in units), the fastest to compute first."""
    if arrays.n <= thresholds.MANY or arrays.pinned.any():
        life, offsets = arrays.hi - arrays.lo, unplaced(arrays)
        free = np.flatnonzero(~arrays.pinned)
        first_fit(arrays, free[np.lexsort((arrays.lo[free], -arrays.size[free]))], offsets)
        yield offsets
        for key in (life, arrays.size * life, arrays.size):
            yield lowest_first(arrays, key)
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
