"""The offset-assignment problem and its solution: plain data, free of torch and of any graph.

This is dynamic storage allocation as google/minimalloc states it: buffers with a size in bytes and a live
interval in steps are given; find an offset for each so that no two that are alive together overlap, in the
smallest arena. A problem can come from a traced graph (`memplan.core.lifetimes`), a CSV file (`memplan.csvio`)
or be written by hand.
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
    """A half-open range [start, end) of steps. Touching intervals are disjoint (tract's `Lifetime`)."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise InvalidProblem(f"interval ends at {self.end}, before its start {self.start}")

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def is_empty(self) -> bool:
        return self.end == self.start

    def is_disjoint(self, other: Interval) -> bool:
        return self.end <= other.start or other.end <= self.start

    def is_alive_at_step(self, step: int) -> bool:
        return self.start <= step < self.end


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Bytes that must stay at one offset while they are alive.

    `live` is the hull of the lifetime in steps; `gaps` are sub-intervals of it, sorted and disjoint, during
    which the bytes are free for others (the buffer is evicted, and returns to the *same* offset; an evicted
    buffer that may return elsewhere is two buffers). `alignment` is in bytes; `pinned_offset` fixes the
    offset. `kind` and `origin` are carried for reports; no solver looks at them.
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
        """The lifetime without its gaps: the intervals during which the bytes are taken."""
        if not self.gaps:
            return (self.live,)
        starts = (self.live.start, *(gap.end for gap in self.gaps))
        ends = (*(gap.start for gap in self.gaps), self.live.end)
        return tuple(Interval(start, end) for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Buffers to place, in definition order (which breaks all ties), and an optional hard limit in bytes."""

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
        """(step, live bytes from that step on), at every step where the sum changes, by step."""
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
        """Largest sum of live sizes over all steps, bytes: no arena can be smaller."""
        return max((total for _, total in self.live_profile), default=0)

    @cached_property
    def peak_step(self) -> int:
        """The first step at which `max_live` bytes are alive (0 for an empty problem)."""
        return next((step for step, total in self.live_profile if total == self.max_live), 0)

    def alive_at(self, step: int) -> tuple[Buffer, ...]:
        """The buffers that hold bytes at `step`, in definition order."""
        return tuple(b for b in self.buffers if any(s.is_alive_at_step(step) for s in b.segments))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides a solution: ids, kinds and origins do not."""
        digest = hashlib.sha256()
        for b in self.buffers:
            gaps = [(gap.start, gap.end) for gap in b.gaps]
            digest.update(repr((b.size, b.live.start, b.live.end, b.alignment, gaps, b.pinned_offset)).encode())
        digest.update(repr(self.capacity).encode())
        return digest.hexdigest()


class Status(enum.Enum):
    """How good a solution is; the value is the message for the user."""

    OPTIMAL = "the arena is as small as any arena can be, proven by the bound"
    FEASIBLE = "a valid placement; a smaller arena may exist, down to the bound"
    INFEASIBLE = "no placement fits the capacity"
    UNKNOWN = "no placement within the capacity was found under the time limit, and none was excluded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasibility:
    """Why no placement fits: at `step`, the buffers `ids` (alive together) need `needed` > capacity bytes."""

    step: int
    ids: tuple[str, ...]
    needed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An offset in bytes for every buffer of a problem.

    `arena_size` is the highest end of any buffer; `bound` a proven lower bound of any arena; `seconds` the
    wall time spent, which is not part of the value (it takes no part in comparisons). With status
    INFEASIBLE or UNKNOWN, `offsets` may hold a placement that exceeds the capacity, or nothing. `claimed`: the
    bound, and with it OPTIMAL, is what a plan file says, and more than loading the file proved; like `seconds` it
    is not part of the value.
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
        """Copies and pickles: a read-only mapping has neither."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return partial(Solution, **{**own, "offsets": dict(self.offsets)}), ()

    @property
    def gap(self) -> float:
        """How far the arena may be from the smallest: arena / bound - 1."""
        return self.arena_size / self.bound - 1 if self.bound else 0.0
