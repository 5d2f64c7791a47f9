"""`greedy` and `greedy-best`: place buffers by descending size, first-fit or best-fit. `portfolio` starts from it.

The largest buffer comes first, each at the lowest (the tightest) offset that is free during its whole live interval
(Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020; first-fit is TFLite Micro's
`GreedyMemoryPlanner`, best-fit TFLite's arena). It is within 1 % of max live on most graphs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers.arrays.sequence import in_order
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.limits import SolverLimits


@dataclass(frozen=True, slots=True)
class Greedy:
    """Places buffers by descending size; ties go by start, then by definition order. Pinned buffers come first."""

    best_fit: bool = False

    @property
    def name(self) -> str:
        return "greedy-best" if self.best_fit else "greedy"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        offsets = in_order(problem, by_size(problem), best=self.best_fit)
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


def by_size(problem: Problem) -> list[Buffer]:
    """The buffers of `problem`, largest first; ties go by start, then by definition order."""
    return sorted(problem.buffers, key=lambda b: (-b.size, b.live.start))
