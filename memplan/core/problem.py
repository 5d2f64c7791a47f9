"""The offset-assignment problem and its solution: plain data, independent of torch and of any graph.

This is dynamic storage allocation as google/minimalloc states it. Given are buffers with a size in bytes and a live
interval in steps; wanted is an offset for each buffer, such that no two buffers that are alive at the same step
overlap, in the smallest arena. A problem is made from a traced graph, read from a CSV file (`memplan.csvio`) or
written by hand.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from memplan.errors import InvalidProblem


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """A half-open range [start, end) of steps. Intervals that only touch are disjoint.

    Args:
        start: the first step.
        end: the step after the last one; not below `start`.

    Raises:
        InvalidProblem: `end` is below `start`.

    Example:
        >>> Interval(0, 3).is_disjoint(Interval(3, 5))
        True
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise InvalidProblem(f"interval ends at {self.end}, before its start {self.start}")

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def is_empty(self) -> bool:
        """Whether the interval has no step."""
        return self.end == self.start

    def is_disjoint(self, other: Interval) -> bool:
        """Return whether the two intervals have no step in common.

        Args:
            other: the other interval.

        Returns:
            True if no step is in both.

        Example:
            >>> Interval(0, 3).is_disjoint(Interval(3, 5))
            True
        """
        return self.end <= other.start or other.end <= self.start

    def is_alive_at_step(self, step: int) -> bool:
        """Return whether a step is in the interval.

        Args:
            step: a step of the schedule.

        Returns:
            True from `start` up to `end`, exclusive.

        Example:
            >>> Interval(0, 3).is_alive_at_step(3)
            False
        """
        return self.start <= step < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Bytes that must stay at one offset while they are alive.

    Args:
        id: the name of the buffer, unique in its problem.
        size: bytes, 0 or more.
        live: the live interval in steps, from the first use to the last; not empty.
        alignment: the offset is a multiple of this, bytes.
        gaps: intervals strictly inside `live`, sorted and apart, during which other buffers may take the bytes. After
            a gap the buffer is at the *same* offset; an evicted buffer that may return elsewhere is two buffers.
        kind: the purpose of the bytes ("activation"), for reports; no solver reads it.
        pinned_offset: the offset in bytes that the buffer must have, a multiple of `alignment`; None for any.
        origin: where the buffer comes from (a module path), for reports; no solver reads it.

    Raises:
        InvalidProblem: a value is out of its range.

    Example:
        >>> Buffer(id="a", size=4096, live=Interval(0, 3), alignment=64).size
        4096
    """

    id: str
    size: int
    live: Interval
    alignment: int = 1
    gaps: tuple[Interval, ...] = ()
    kind: str = ""
    pinned_offset: int | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        where = f"buffer {self.id!r}"
        if not isinstance(self.live, Interval) or not hasattr(self.size, "__index__"):
            hint = "write size=BYTES, live=Interval(start, end)"
            raise InvalidProblem(f"size={self.size!r}, live={self.live!r}", where=where, hint=hint)
        if self.size < 0:
            raise InvalidProblem(f"negative size {self.size}", where=where)
        if self.alignment < 1:
            raise InvalidProblem(f"alignment {self.alignment} is not positive", where=where)
        if self.live.is_empty:
            raise InvalidProblem(f"live interval [{self.live.start}, {self.live.end}) is empty", where=where)
        if self.pinned_offset is not None and (self.pinned_offset < 0 or self.pinned_offset % self.alignment):
            raise InvalidProblem(
                f"pinned offset {self.pinned_offset} is negative or not a multiple of {self.alignment}", where=where
            )
        for gap in self.gaps:
            if gap.is_empty or gap.start <= self.live.start or gap.end >= self.live.end:
                raise InvalidProblem(f"gap [{gap.start}, {gap.end}) is not strictly inside the lifetime", where=where)
        for one, two in pairwise(self.gaps):
            if two.start <= one.end:
                raise InvalidProblem(f"gaps [..., {one.end}) and [{two.start}, ...) are not apart", where=where)

    @property
    def segments(self) -> tuple[Interval, ...]:
        """The live interval without the gaps: the intervals during which the buffer needs its bytes."""
        if not self.gaps:
            return (self.live,)
        starts = (self.live.start, *(gap.end for gap in self.gaps))
        ends = (*(gap.start for gap in self.gaps), self.live.end)
        return tuple(Interval(start, end) for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An offset-assignment problem: buffers to place, and optionally a hard limit on the arena.

    Args:
        buffers: the buffers, with unique ids. Solvers break ties by this order.
        capacity: the most bytes that the arena may have; None for no limit.

    Raises:
        InvalidProblem: two buffers have the same id, or the capacity is negative.

    Example:
        >>> Problem(buffers=(Buffer(id="a", size=8, live=Interval(0, 2)),)).max_live
        8
    """

    buffers: tuple[Buffer, ...]
    capacity: int | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for buffer in self.buffers:
            if buffer.id in seen:
                raise InvalidProblem("id is not unique", where=f"buffer {buffer.id!r}")
            seen.add(buffer.id)
        if self.capacity is not None and self.capacity < 0:
            raise InvalidProblem(f"negative capacity {self.capacity}")

    @cached_property
    def live_profile(self) -> tuple[tuple[int, int], ...]:
        """Pairs (step, live bytes from that step on), one for every step at which births or deaths occur, by step."""
        change: dict[int, int] = {}
        for buffer in self.buffers:
            for segment in buffer.segments:
                change[segment.start] = change.get(segment.start, 0) + buffer.size
                change[segment.end] = change.get(segment.end, 0) - buffer.size
        total, profile = 0, []
        for step in sorted(change):
            total += change[step]
            profile.append((step, total))
        return tuple(profile)

    @cached_property
    def max_live(self) -> int:
        """The largest sum of live sizes over all steps, bytes: no arena can be smaller."""
        return max((total for _, total in self.live_profile), default=0)

    @cached_property
    def peak_step(self) -> int:
        """The first step at which `max_live` bytes are alive (0 for an empty problem)."""
        return next((step for step, total in self.live_profile if total == self.max_live), 0)

    def alive_at(self, step: int) -> tuple[Buffer, ...]:
        """Return the buffers that are alive at a step.

        Args:
            step: a step of the schedule.

        Returns:
            The buffers, in definition order.

        Example:
            >>> [buffer.id for buffer in problem.alive_at(problem.peak_step)]
        """
        return tuple(b for b in self.buffers if any(s.is_alive_at_step(step) for s in b.segments))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that a solution depends on, which leaves out ids, kinds and origins."""
        digest = hashlib.sha256()
        for b in self.buffers:
            gaps = [(gap.start, gap.end) for gap in b.gaps]
            digest.update(repr((b.size, b.live.start, b.live.end, b.alignment, gaps, b.pinned_offset)).encode())
        digest.update(repr(self.capacity).encode())
        return digest.hexdigest()


class Status(enum.Enum):
    """The quality of a solution; the value is the message for the user.

    Attributes:
        OPTIMAL: no arena can be smaller.
        FEASIBLE: a valid placement; a smaller arena may exist.
        INFEASIBLE: no placement fits the capacity.
        UNKNOWN: neither a placement nor a proof that there is none was found within the limits.

    Example:
        >>> memplan.solve(buffers).status is memplan.Status.OPTIMAL
    """

    OPTIMAL = "the arena is as small as any arena can be, proven by the bound"
    FEASIBLE = "a valid placement; a smaller arena may exist, down to the bound"
    INFEASIBLE = "no placement fits the capacity"
    UNKNOWN = "no placement within the capacity was found under the time limit, and none was excluded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """The reason that no placement fits: at `step`, the buffers `ids` are all alive and need `needed` bytes, more than
    the capacity."""

    step: int
    ids: tuple[str, ...]
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An offset in bytes for every buffer of a problem.

    Args:
        offsets: buffer id -> offset, bytes. With status INFEASIBLE or UNKNOWN it may hold a placement that exceeds
            the capacity, or be empty.
        arena_size: the highest end of any buffer, bytes.
        status: whether the arena is proven to be the smallest.
        bound: a proven lower bound of the arena size, bytes.
        solver: the name of the solver.
        seconds: wall time spent; it takes no part in comparisons.
        proof: the reason that no placement fits, for INFEASIBLE by max live.
        claimed: the bound was read from a plan file and is more than loading the file proved; it takes no part in
            comparisons.

    Example:
        >>> Solution(offsets={"a": 0}, arena_size=8, status=Status.OPTIMAL, bound=8, solver="greedy").gap
        0.0
    """

    offsets: Mapping[str, int]
    arena_size: int
    status: Status
    bound: int
    solver: str
    seconds: float = field(default=0.0, compare=False)
    proof: Infeasibility | None = None
    claimed: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", MappingProxyType(dict(self.offsets)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support `copy` and `pickle`, which cannot copy the read-only `offsets`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(Solution, **{**own, "offsets": dict(self.offsets)}), ()

    @property
    def gap(self) -> float:
        """arena_size / bound - 1: at most this share above the smallest possible arena."""
        return self.arena_size / self.bound - 1 if self.bound else 0.0
