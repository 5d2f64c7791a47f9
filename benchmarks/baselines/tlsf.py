"""`tlsf`: simulates two-level segregated fit, the allocator of many embedded systems, as a comparison.

Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", 2004. Free blocks are kept by size class
(powers of two, each in 32 parts). A request is rounded up to the next class, so that every block of that class fits.
Blocks are split on allocation and coalesced on release. Here the pool grows when needed.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort

from memplan.core.problem import Problem, Solution
from memplan.solvers.base import NO_LIMITS, SolverLimits, align_up, finish

_PARTS = 5  # log2 of the parts of each power of two


def size_class(size: int) -> int:
    """The number of the size class of free blocks of `size` bytes. Larger sizes have higher or equal numbers."""
    if size < 1 << _PARTS:
        return size
    shift = size.bit_length() - 1 - _PARTS
    return ((shift + 1) << _PARTS) + (size >> shift) - (1 << _PARTS)


def class_of_request(size: int) -> int:
    """The lowest size class all of whose blocks have at least `size` bytes."""
    if size < 1 << _PARTS:
        return size
    return size_class(size + (1 << (size.bit_length() - 1 - _PARTS)) - 1)


class TLSF:
    """Allocates in order of time; buffers that start together go in definition order. Gaps are not freed."""

    name = "tlsf"

    def refuses(self, problem: Problem) -> str | None:
        if any(b.pinned_offset is not None for b in problem.buffers):
            return "an allocator chooses addresses itself, so a buffer cannot be pinned to one"
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        pool = _Pool()
        events = [(b.live.start, 1, i) for i, b in enumerate(problem.buffers)]
        events += [(b.live.end, 0, i) for i, b in enumerate(problem.buffers)]
        offsets: dict[str, int] = {}
        blocks: dict[int, tuple[int, int]] = {}
        for _, is_birth, i in sorted(events):
            buffer = problem.buffers[i]
            if not buffer.size:
                offsets[buffer.id] = 0
            elif is_birth:
                # With bytes for the worst misalignment, as TLSF's aligned allocation requests them.
                blocks[i] = pool.take(buffer.size + buffer.alignment - 1)
                offsets[buffer.id] = align_up(blocks[i][0], buffer.alignment)
            else:
                pool.give(*blocks.pop(i))
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


class _Pool:
    def __init__(self) -> None:
        self.end = 0  # bytes in the pool
        self.starts: dict[int, int] = {}  # free blocks: start -> end
        self.ends: dict[int, int] = {}  # the same: end -> start
        self.lists: dict[int, list[int]] = {}  # class -> starts, last released first
        self.classes: list[int] = []  # the classes whose lists are not empty, ascending

    def take(self, size: int) -> tuple[int, int]:
        """Allocate a range [low, high) of at least `size` bytes."""
        place = bisect_left(self.classes, class_of_request(size))
        if place < len(self.classes):
            low = self.lists[self.classes[place]][-1]
        elif self.end in self.ends:  # the free block at the end of the pool grows
            low = self.ends[self.end]
        else:
            low = self.end
        high = self.starts.get(low, self.end)
        if high > low:
            self._remove(low, high)
        self.end = max(self.end, low + size)
        if high > low + size:
            self._insert(low + size, high)
        return low, low + size

    def give(self, low: int, high: int) -> None:
        """Free the range [low, high) and merge it with adjacent free blocks."""
        if high in self.starts:
            joined = self.starts[high]
            self._remove(high, joined)
            high = joined
        if low in self.ends:
            joined = self.ends[low]
            self._remove(joined, low)
            low = joined
        self._insert(low, high)

    def _insert(self, low: int, high: int) -> None:
        self.starts[low], self.ends[high] = high, low
        number = size_class(high - low)
        if not self.lists.setdefault(number, []):
            insort(self.classes, number)
        self.lists[number].append(low)

    def _remove(self, low: int, high: int) -> None:
        del self.starts[low], self.ends[high]
        number = size_class(high - low)
        self.lists[number].remove(low)
        if not self.lists[number]:
            del self.classes[bisect_left(self.classes, number)]
