"""`partition`: tract's greedy partitioning (sonos/tract, gpu/src/memory/schema.rs).

By descending size, each buffer goes into the compatible partition (no live intervals overlap) with the largest total
bytes, or else into a new one. A partition is as large as its largest buffer, and partitions are placed one after
another. The arena is larger than by first-fit, but the table of steps x partitions is readable, and the method also
works for symbolic sizes.
"""

from __future__ import annotations

import time

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers.base import NO_LIMITS, align_up, finish
from memplan.solvers.limits import SolverLimits


class Partition:
    """Places buffers with disjoint live intervals in a common partition; the arena is the sum of all partitions."""

    name = "partition"

    def refuses(self, problem: Problem) -> str | None:
        if any(b.pinned_offset is not None for b in problem.buffers):
            return "a partition has no fixed address, so a buffer cannot be pinned to one"
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        offsets: dict[str, int] = {}
        top = 0
        for partition in partitions(problem):
            top = align_up(top, max(b.alignment for b in partition))
            offsets.update((b.id, top) for b in partition)
            top += max(b.size for b in partition)
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


def partitions(problem: Problem) -> tuple[tuple[Buffer, ...], ...]:
    """The partitions, in the order in which they were opened; each holds buffers with disjoint live intervals."""
    found: list[list[Buffer]] = []
    totals: list[int] = []
    for buffer in sorted(problem.buffers, key=lambda b: (-b.size, b.live.start)):
        fits = [i for i, members in enumerate(found) if all(_disjoint(buffer, m) for m in members)]
        if fits:
            best = max(fits, key=lambda i: (totals[i], -i))
            found[best].append(buffer)
            totals[best] += buffer.size
        else:
            found.append([buffer])
            totals.append(buffer.size)
    return tuple(tuple(members) for members in found)


def _disjoint(one: Buffer, two: Buffer) -> bool:
    return all(a.is_disjoint(b) for a in one.segments for b in two.segments)
