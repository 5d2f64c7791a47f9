"""Places buffers one by one in a given order, the core of most heuristics of the field."""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Sequence

from memplan.core.problem import Buffer, Problem
from memplan.solvers import thresholds
from memplan.solvers.base import align_up


def in_order(
    problem: Problem, order: Sequence[Buffer], *, best: bool = False, compiled: bool | None = None
) -> dict[str, int]:
    """Offsets (bytes) if each buffer of `order` takes the first (with `best`: tightest) free offset.

    An offset is free if the buffer overlaps no pinned buffer and no buffer before it in `order` during its whole live
    interval. Ties go to the lower offset. `order` must hold every buffer that is not pinned. `compiled` selects the
    compiled or the plain Python code; None selects by the number of buffers. Both give the same offsets.
    """
    if len(problem.buffers) > thresholds.COMPILED if compiled is None else compiled:
        return _compiled(problem, order, best=best)
    placed: list[tuple[int, int, Buffer]] = []  # (offset, rank, buffer), by offset
    offsets: dict[str, int] = {}
    pinned = [b for b in problem.buffers if b.pinned_offset is not None]
    for rank, buffer in enumerate([*pinned, *(b for b in order if b.pinned_offset is None)]):
        offset = buffer.pinned_offset
        if offset is None:
            offset = _free_offset(buffer, placed, best=best) if buffer.size else 0
        offsets[buffer.id] = offset
        if buffer.size:
            insort(placed, (offset, rank, buffer), key=lambda entry: entry[:2])
    return offsets


def _free_offset(buffer: Buffer, placed: list[tuple[int, int, Buffer]], *, best: bool) -> int:
    """The lowest or tightest aligned offset at which `buffer` overlaps none of `placed` (sorted by offset)."""
    at, chosen, least_room = 0, -1, sys.maxsize
    for low, _, other in placed:
        if not _alive_together(buffer, other):
            continue
        if low >= at + buffer.size:
            if not best:
                return at
            if low - at < least_room:
                chosen, least_room = at, low - at
        if low + other.size > at:
            at = align_up(low + other.size, buffer.alignment)
    return at if chosen < 0 else chosen


def _alive_together(one: Buffer, two: Buffer) -> bool:
    if one.live.is_disjoint(two.live):
        return False
    if not one.gaps and not two.gaps:
        return True
    return any(not a.is_disjoint(b) for a in one.segments for b in two.segments)


def _compiled(problem: Problem, order: Sequence[Buffer], *, best: bool) -> dict[str, int]:
    import numpy as np

    from memplan.solvers.arrays.heuristics import first_fit, unplaced
    from memplan.solvers.arrays.problem_arrays import make_problem_arrays

    arrays = make_problem_arrays(problem)
    place = {problem.buffers[i].id: at for at, i in enumerate(arrays.source.tolist())}
    offsets = unplaced(arrays)
    first_fit(arrays, np.array([place[b.id] for b in order if b.size and b.pinned_offset is None], np.int64), offsets,
              best=best)  # fmt: skip
    found = {b.id: b.pinned_offset or 0 for b in problem.buffers}
    found.update(zip(place, (offsets * arrays.unit).tolist(), strict=True))
    return found
