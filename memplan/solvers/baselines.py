"""Solvers of one rule each. The portfolio starts from `greedy` and falls back to `naive`; users may select any.

- `greedy` places buffers by descending size, first-fit (Pisarchyk and Lee, "Efficient
  Memory Management for Deep Neural Net Inference", 2020). It is within 1 % of max live on most graphs.
- `naive` gives every buffer bytes of its own, which is the largest arena that a planner is compared with.
- `online-first` and `online-best` simulate an allocator, which does not know the future: memory is allocated at birth
  and freed at death, in order of time, from a list of coalesced holes.
- `partition` is the greedy partitioning of tract (sonos/tract, gpu/src/memory/schema.rs). By descending size, each
  buffer goes into the compatible partition (no live intervals overlap) with the largest total bytes, or else into a new
  one. The table of steps x partitions is readable, and the method also works for symbolic sizes.
- `tstack` is the layout of the ext-tstack note: first-fit by descending release step; ties go by start, then by
  definition order. A buffer is above the result that is computed from it, so its release leaves one contiguous hole at
  the top, which the next load or result takes.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers import thresholds
from memplan.solvers.base import NO_LIMITS, SolverLimits, align_up, finish

Offsets = dict[str, int]  # id -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSolver:
    """A solver that is one function from a problem to offsets; `unpinned` says why it cannot pin a buffer."""

    name: str
    place: Callable[[Problem], Offsets]
    unpinned: str = ""

    def refuses(self, problem: Problem) -> str | None:
        """Return why the problem cannot be solved by the rule, or None."""
        pinned = self.unpinned and any(b.pinned_offset is not None for b in problem.buffers)
        return f"{self.unpinned}, so a buffer cannot be pinned to one" if pinned else None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        """Place every buffer; limits and seed change nothing."""
        began = time.perf_counter()
        offsets = self.place(problem)
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


def in_order(problem: Problem, order: Sequence[Buffer], *, arrays: bool | None = None) -> Offsets:
    """Offsets (bytes) if each buffer of `order` takes the first free offset.

    An offset is free if the buffer overlaps no pinned buffer and no buffer before it in `order` during its whole live
    interval. `order` must hold every buffer that is not pinned. `arrays` selects numpy
    or plain Python; None selects by the number of buffers. Both give the same offsets.
    """
    if len(problem.buffers) > thresholds.SMALL if arrays is None else arrays:
        return _by_arrays(problem, order)
    placed: list[tuple[int, int, Buffer]] = []  # (offset, rank, buffer), by offset
    offsets: Offsets = {}
    pinned = [b for b in problem.buffers if b.pinned_offset is not None]
    for rank, buffer in enumerate([*pinned, *(b for b in order if b.pinned_offset is None)]):
        offset = buffer.pinned_offset
        if offset is None:
            offset = _free_offset(buffer, placed) if buffer.size else 0
        offsets[buffer.id] = offset
        if buffer.size:
            insort(placed, (offset, rank, buffer), key=lambda entry: entry[:2])
    return offsets


def _free_offset(buffer: Buffer, placed: list[tuple[int, int, Buffer]]) -> int:
    """The lowest aligned offset at which `buffer` overlaps none of `placed` (sorted by offset)."""
    at = 0
    for low, _, other in placed:
        if not _alive_together(buffer, other):
            continue
        if low >= at + buffer.size:
            return at
        if low + other.size > at:
            at = align_up(low + other.size, buffer.alignment)
    return at


def _alive_together(one: Buffer, two: Buffer) -> bool:
    if one.live.is_disjoint(two.live):
        return False
    if not one.gaps and not two.gaps:
        return True
    return any(not a.is_disjoint(b) for a in one.segments for b in two.segments)


def _by_arrays(problem: Problem, order: Sequence[Buffer]) -> Offsets:
    import numpy as np

    from memplan.solvers.arrays import make_problem_arrays
    from memplan.solvers.heuristics import first_fit, unplaced

    arrays = make_problem_arrays(problem)
    place = {problem.buffers[i].id: at for at, i in enumerate(arrays.source.tolist())}
    offsets = unplaced(arrays)
    first_fit(arrays, np.array([place[b.id] for b in order if b.size and b.pinned_offset is None], np.int64), offsets)
    found = {b.id: b.pinned_offset or 0 for b in problem.buffers}
    found.update(zip(place, (offsets * arrays.unit).tolist(), strict=True))
    return found


def by_size(problem: Problem) -> list[Buffer]:
    """The buffers of `problem`, largest first; ties go by start, then by definition order."""
    return sorted(problem.buffers, key=lambda b: (-b.size, b.live.start))


def _greedy(problem: Problem) -> Offsets:
    return in_order(problem, by_size(problem))


def _tstack(problem: Problem) -> Offsets:
    return in_order(problem, sorted(problem.buffers, key=lambda b: (-b.live.end, b.live.start)))


def _naive(problem: Problem) -> Offsets:
    """Place buffers one after another without sharing bytes; pinned buffers come first, the others above them."""
    offsets = {b.id: b.pinned_offset for b in problem.buffers if b.pinned_offset is not None}
    top = max((b.pinned_offset + b.size for b in problem.buffers if b.pinned_offset is not None), default=0)
    for b in problem.buffers:
        if b.pinned_offset is None:
            offsets[b.id] = align_up(top, b.alignment)
            top = offsets[b.id] + b.size
    return offsets


def _online(problem: Problem, *, best: bool) -> Offsets:
    """Allocate first-fit or best-fit. Buffers that start together go by descending size. Gaps are not freed."""
    from memplan.solvers.arrays import make_problem_arrays
    from memplan.solvers.heuristics import online

    arrays = make_problem_arrays(problem)
    offsets = {b.id: 0 for b in problem.buffers}
    if arrays.n:
        values = (next(online(arrays, best)) * arrays.unit).tolist()
        offsets.update(zip((problem.buffers[i].id for i in arrays.source.tolist()), values, strict=True))
    return offsets


def _partition(problem: Problem) -> Offsets:
    """Place buffers with disjoint live intervals in a common partition; the arena is the sum of all partitions."""
    offsets: Offsets = {}
    top = 0
    for partition in partitions(problem):
        top = align_up(top, max(b.alignment for b in partition))
        offsets.update((b.id, top) for b in partition)
        top += max(b.size for b in partition)
    return offsets


def partitions(problem: Problem) -> tuple[tuple[Buffer, ...], ...]:
    """The partitions, in the order in which they were opened; each holds buffers with disjoint live intervals."""
    found: list[list[Buffer]] = []
    totals: list[int] = []
    for buffer in by_size(problem):
        fits = [i for i, members in enumerate(found) if not any(_alive_together(buffer, m) for m in members)]
        if fits:
            best = max(fits, key=lambda i: (totals[i], -i))
            found[best].append(buffer)
            totals[best] += buffer.size
        else:
            found.append([buffer])
            totals.append(buffer.size)
    return tuple(tuple(members) for members in found)


_ALLOCATOR = "an allocator chooses addresses itself"
GREEDY, NAIVE = RuleSolver(name="greedy", place=_greedy), RuleSolver(name="naive", place=_naive)
RULES = (
    GREEDY,
    RuleSolver(name="tstack", place=_tstack),
    RuleSolver(name="partition", place=_partition, unpinned="a partition has no fixed address"),
    RuleSolver(name="online-first", place=partial(_online, best=False), unpinned=_ALLOCATOR),
    RuleSolver(name="online-best", place=partial(_online, best=True), unpinned=_ALLOCATOR),
    NAIVE,
)
