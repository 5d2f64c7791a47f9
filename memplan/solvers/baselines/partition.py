"""`partition`: tract's greedy partitioning (sonos/tract, gpu/src/memory/schema.rs).

Buffers by descending size, each into the compatible partition (no lifetime meets) with the largest total
bytes, else into a new one; a partition is as large as its largest buffer, and partitions lie one after
another. Worse than first-fit, but its table of steps x partitions can be read, and it works symbolically.
"""

from __future__ import annotations

import time

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers.base import NO_LIMITS, align_up, finish
from memplan.solvers.limits import SolverLimits


class Partition:
    """Disjoint lifetimes share a partition; arena = sum of the partitions' maxima."""

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
    """The partitions, in the order in which they were opened; each holds buffers with disjoint lifetimes."""
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
