"""`naive`: gives every buffer bytes of its own, which is the largest arena that a planner is compared with."""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers.base import NO_LIMITS, align_up, finish
from memplan.solvers.limits import SolverLimits


class Naive:
    """Places buffers one after another without sharing bytes; pinned buffers come first, the others above them."""

    name = "naive"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        offsets = {b.id: b.pinned_offset for b in problem.buffers if b.pinned_offset is not None}
        top = max((b.pinned_offset + b.size for b in problem.buffers if b.pinned_offset is not None), default=0)
        for b in problem.buffers:
            if b.pinned_offset is None:
                offsets[b.id] = align_up(top, b.alignment)
                top = offsets[b.id] + b.size
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)
