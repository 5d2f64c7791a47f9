"""The independent validator of solutions. It shares no code with any solver.

A sweep over time keeps the address ranges in use, sorted; each buffer that becomes alive must fit between them. The
idea is that of minimalloc's `validator.cc`, but here it always runs, and it names the violation.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort

from memplan.core.arguments import require_kind
from memplan.core.problem import Buffer, Problem, Solution, Status
from memplan.errors import InvalidSolution


class Violation(enum.StrEnum):
    """The reasons for which `validate` refuses a solution."""

    MISSING = "missing"
    UNKNOWN_BUFFER = "unknown buffer"
    OUT_OF_ARENA = "out of the arena"
    OVER_CAPACITY = "over capacity"
    MISALIGNED = "misaligned"
    PINNED_MOVED = "pinned moved"
    OVERLAP = "overlap"
    WRONG_ARENA = "wrong arena size"
    WRONG_BOUND = "wrong bound"
    WRONG_STATUS = "wrong status"


def validate(problem: Problem, solution: Solution) -> None:
    """Check that `solution` is valid for `problem`.

    For status INFEASIBLE, the proof is checked instead of the offsets. For status UNKNOWN, the offsets may be empty or
    may exceed the capacity, but must be valid otherwise.

    Args:
        problem: the buffers and the capacity, bytes.
        solution: the offsets, bytes, with the arena size, the bound and the status that they are said to have.

    Raises:
        InvalidSolution: names the first violation and the buffer.

    Example:
        >>> problem = Problem(buffers=(Buffer(id="a", size=8, live=Interval(0, 2)),))
        >>> validate(problem, memplan.solve(problem))
    """
    require_kind(problem, Problem, "validate", "give a Problem, and the Solution of memplan.solve")
    require_kind(solution, Solution, "validate", "give the Solution of memplan.solve")
    if solution.status is Status.INFEASIBLE:
        _check_proof(problem, solution)
        return
    if solution.status is Status.UNKNOWN and not solution.offsets:
        return
    _check_ids(problem, solution)
    for buffer in problem.buffers:
        _check_alone(buffer, solution.offsets[buffer.id], solution.arena_size)
    _check_totals(problem, solution)
    _check_overlaps(problem, solution)


def _fail(violation: Violation, what: str, where: str | None = None) -> InvalidSolution:
    return InvalidSolution(f"{violation.value}: {what}", violation=violation.value, where=where)


def _check_ids(problem: Problem, solution: Solution) -> None:
    known = {buffer.id for buffer in problem.buffers}
    for buffer in problem.buffers:
        if buffer.id not in solution.offsets:
            raise _fail(Violation.MISSING, "has no offset", f"buffer {buffer.id!r}")
    for name in solution.offsets:
        if name not in known:
            raise _fail(Violation.UNKNOWN_BUFFER, "is not part of the problem", f"buffer {name!r}")


def _check_alone(buffer: Buffer, offset: int, arena_size: int) -> None:
    where = f"buffer {buffer.id!r}"
    if offset < 0 or offset + buffer.size > arena_size:
        end = offset + buffer.size
        raise _fail(Violation.OUT_OF_ARENA, f"[{offset}, {end}) is not inside the arena of {arena_size} bytes", where)
    if offset % buffer.alignment:
        raise _fail(Violation.MISALIGNED, f"offset {offset} is not a multiple of {buffer.alignment}", where)
    if buffer.pinned_offset is not None and offset != buffer.pinned_offset:
        raise _fail(Violation.PINNED_MOVED, f"is at {offset}, pinned to {buffer.pinned_offset}", where)


def _check_totals(problem: Problem, solution: Solution) -> None:
    end = max((solution.offsets[b.id] + b.size for b in problem.buffers), default=0)
    if solution.arena_size != end:
        raise _fail(Violation.WRONG_ARENA, f"says {solution.arena_size} bytes, its buffers end at {end}")
    if solution.bound > solution.arena_size:
        raise _fail(Violation.WRONG_BOUND, f"bound {solution.bound} exceeds the arena of {solution.arena_size} bytes")
    if solution.status is Status.OPTIMAL and solution.arena_size != solution.bound:
        raise _fail(Violation.WRONG_STATUS, f"optimal, but arena {solution.arena_size} is above {solution.bound}")
    fits = problem.capacity is None or solution.arena_size <= problem.capacity
    if not fits and solution.status is not Status.UNKNOWN:
        raise _fail(Violation.OVER_CAPACITY, f"arena {solution.arena_size} exceeds {problem.capacity} bytes")


def _check_overlaps(problem: Problem, solution: Solution) -> None:
    # Events by time; deaths (0) before births (1), since intervals are half-open.
    events: list[tuple[int, int, int, int, str]] = []
    for buffer in problem.buffers:
        if not buffer.size:
            continue
        low = solution.offsets[buffer.id]
        for segment in buffer.segments:
            events.append((segment.start, 1, low, low + buffer.size, buffer.id))
            events.append((segment.end, 0, low, low + buffer.size, buffer.id))
    events.sort()
    taken: list[tuple[int, int, str]] = []  # (low, high, id): disjoint, hence sorted by both ends
    for step, is_birth, low, high, name in events:
        place = bisect_left(taken, (low, high, name))
        if not is_birth:
            del taken[place]
            continue
        for other_low, other_high, other in taken[max(place - 1, 0) : place + 1]:
            if low < other_high and other_low < high:
                what = f"[{low}, {high}) and {other!r} at [{other_low}, {other_high}) are both alive at step {step}"
                raise _fail(Violation.OVERLAP, what, f"buffer {name!r}")
        insort(taken, (low, high, name))


def _check_proof(problem: Problem, solution: Solution) -> None:
    """Raise `InvalidSolution` unless the bound is above the capacity and the sizes in the proof add up."""
    if problem.capacity is None or solution.bound <= problem.capacity:
        raise _fail(Violation.WRONG_STATUS, f"infeasible, but the bound {solution.bound} is within the capacity")
    if solution.proof is None:
        return
    by_id = {buffer.id: buffer for buffer in problem.buffers}
    for name in solution.proof.ids:
        if name not in by_id:
            raise _fail(Violation.UNKNOWN_BUFFER, "is named in the proof", f"buffer {name!r}")
        if not any(s.is_alive_at_step(solution.proof.step) for s in by_id[name].segments):
            raise _fail(Violation.WRONG_STATUS, f"proof counts it at step {solution.proof.step}", f"buffer {name!r}")
    total = sum(by_id[name].size for name in set(solution.proof.ids))
    if total != solution.proof.needed or total <= problem.capacity:
        raise _fail(Violation.WRONG_STATUS, f"the buffers of the proof add up to {total} bytes")
