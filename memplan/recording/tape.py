"""Tapes: the allocations of one step in order, and the offset of each in the arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memplan.core.problem import Buffer, Interval, Problem, Solution, Status

ELSEWHERE = -1  # the offset of an allocation that outlives the step: it gets ordinary memory


@dataclass(frozen=True, slots=True)
class TapeEvent:
    """An allocation (`nbytes` > 0) or a release at an address, by an op ("" if unknown).

    `lane`: a number of the stream (and its device) that uses the bytes; 0 if it is not known.
    """

    address: int
    nbytes: int
    op: str = ""
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """The allocations of a step: the k-th has `sizes[k]` bytes at `offsets[k]` (or `ELSEWHERE`), in lane `lanes[k]`.

    `before[k]` are the last allocations before the k-th that had some of its bytes: they must be released by then.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    lanes: tuple[int, ...]
    arena_size: int


def lives(events: Sequence[TapeEvent]) -> list[Interval | None]:
    """Return the live interval of each allocation, in order, in events; None for one that is not released."""
    open_at: dict[int, tuple[int, int]] = {}
    found: list[Interval | None] = []
    for step, event in enumerate(events):
        if event.nbytes > 0:
            open_at[event.address] = len(found), step
            found.append(None)
        elif event.address in open_at:
            index, birth = open_at.pop(event.address)
            found[index] = Interval(birth, step)
    return found


def make_tape(events: Sequence[TapeEvent], problem: Problem, offsets: Mapping[str, int], arena_size: int) -> Tape:
    """Return the tape of a recording and its offsets; the buffers are the released allocations in their order."""
    made = [event for event in events if event.nbytes > 0]
    buffers = {b.live.start: b for b in problem.buffers}
    starts = [step for step, event in enumerate(events) if event.nbytes > 0]
    at = tuple(offsets[buffers[step].id] if step in buffers else ELSEWHERE for step in starts)
    ends = tuple(offset + buffers[step].size if offset >= 0 else 0 for step, offset in zip(starts, at, strict=True))
    return Tape(
        sizes=tuple(event.nbytes for event in made),
        offsets=at,
        before=_owners(at, ends),
        lanes=tuple(event.lane for event in made),
        arena_size=arena_size,
    )


def solve_lanes(problem: Problem, lanes: Mapping[str, int], solve: Callable[[Problem], Solution]) -> Solution:
    """Return a solution in which buffers of different lanes (by id) share no bytes: each lane has a section.

    The order of events says nothing about two streams: what one has released, it may still read.
    """
    of: dict[int, list[Buffer]] = {}
    for buffer in problem.buffers:
        of.setdefault(lanes[buffer.id], []).append(buffer)
    if len(of) < 2:
        return solve(problem)
    offsets: dict[str, int] = {}
    found, start = [], 0
    for buffers in of.values():
        alignment = max(b.alignment for b in buffers)
        start = -(-start // alignment) * alignment
        found.append(solve(Problem(buffers=tuple(buffers))))
        offsets.update({name: start + offset for name, offset in found[-1].offsets.items()})
        start += found[-1].arena_size
    return replace(
        found[0],
        offsets=offsets,
        arena_size=start,
        status=Status.OPTIMAL if start == problem.max_live else Status.FEASIBLE,
        bound=problem.max_live,
        seconds=sum(solution.seconds for solution in found),
    )


def _owners(starts: Sequence[int], ends: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each range [start, end) of bytes, in order, the ranges before it that had some of its bytes last."""
    owned: list[tuple[int, int, int]] = []  # disjoint (start, end, owner)
    found: list[tuple[int, ...]] = []
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        before, rest = [], []
        if start < 0:
            found.append(())
            continue
        for low, high, owner in owned:
            if high <= start or end <= low:
                rest.append((low, high, owner))
                continue
            before.append(owner)
            rest += [(low, start, owner)] if low < start else []
            rest += [(end, high, owner)] if end < high else []
        owned = [*rest, (start, end, index)]
        found.append(tuple(sorted(set(before))))
    return tuple(found)
