"""`tstack`: the layout of the ext-tstack note. What is released later lies lower.

First-fit by descending release step: a buffer that will be released lies after the result that is computed
from it, so releasing it leaves one contiguous hole at the top, which the next load or result takes.
"""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers.arrays.sequence import in_order
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.limits import SolverLimits


class TStack:
    """By descending end of life; ties by birth, then by definition order. Pinned buffers come first."""

    name = "tstack"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        order = sorted(problem.buffers, key=lambda b: (-b.live.end, b.live.start))
        offsets = in_order(problem, order)
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)
