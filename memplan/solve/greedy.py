"""`greedy`: size-descending first-fit, the field's baseline (TFLite's and ExecuTorch's "greedy by size").

Largest buffer first, each at the lowest offset that is free during its whole lifetime (Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference", 2020). Within 1 % of max live on most graphs.
"""

from __future__ import annotations

import time
from bisect import insort

from memplan.problem import Buffer, Problem, Solution
from memplan.solve.base import NO_LIMITS, align_up, finish
from memplan.solve.budget import Limits


class Greedy:
    """First-fit by descending size; ties by birth, then by definition order. Pinned buffers come first."""

    name = "greedy"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: Limits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        order = sorted(problem.buffers, key=lambda b: (b.pinned_offset is None, -b.size, b.live.start))
        placed: list[tuple[int, int, Buffer]] = []  # (offset, rank, buffer), by offset
        offsets: dict[str, int] = {}
        for rank, buffer in enumerate(order):
            offset = _first_fit(buffer, placed) if buffer.pinned_offset is None else buffer.pinned_offset
            offsets[buffer.id] = offset
            if buffer.size:
                insort(placed, (offset, rank, buffer), key=lambda entry: entry[:2])
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


def _first_fit(buffer: Buffer, placed: list[tuple[int, int, Buffer]]) -> int:
    """Lowest aligned offset at which `buffer` meets none of `placed` (sorted by offset)."""
    offset = 0
    for low, _, other in placed:
        if low >= offset + buffer.size:
            break
        if low + other.size > offset and _alive_together(buffer, other):
            offset = align_up(low + other.size, buffer.alignment)
    return offset


def _alive_together(one: Buffer, two: Buffer) -> bool:
    if one.live.is_disjoint(two.live):
        return False
    if not one.gaps and not two.gaps:
        return True
    return any(not a.is_disjoint(b) for a in one.segments for b in two.segments)
