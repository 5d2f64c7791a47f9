"""`tstack`: the layout of the ext-tstack note, in which buffers that are released later have lower offsets.

It is first-fit by descending release step. A buffer is above the result that is computed from it, so its release leaves
one contiguous hole at the top, which the next load or result takes.
"""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers.arrays.sequence import in_order
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.limits import SolverLimits


class TStack:
    """Places buffers by descending end; ties go by start, then by definition order. Pinned buffers come first."""

    name = "tstack"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        order = sorted(problem.buffers, key=lambda b: (-b.live.end, b.live.start))
        offsets = in_order(problem, order)
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)
