"""`online-first` and `online-best`: simulate an allocator, which does not know the future, as a comparison.

Memory is allocated at birth and freed at death, in order of time, from a list of coalesced holes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from memplan.core.problem import Problem, Solution
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.limits import SolverLimits


@dataclass(frozen=True, slots=True)
class Online:
    """Allocates first-fit or best-fit. Buffers that start together go by descending size. Gaps are not freed."""

    best_fit: bool

    @property
    def name(self) -> str:
        return "online-best" if self.best_fit else "online-first"

    def refuses(self, problem: Problem) -> str | None:
        if any(b.pinned_offset is not None for b in problem.buffers):
            return "an allocator chooses addresses itself, so a buffer cannot be pinned to one"
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        from memplan.solvers.arrays.heuristics import online
        from memplan.solvers.arrays.problem_arrays import make_problem_arrays

        began = time.perf_counter()
        arrays = make_problem_arrays(problem)
        offsets = {b.id: 0 for b in problem.buffers}
        if arrays.n:
            values = (next(online(arrays, self.best_fit)) * arrays.unit).tolist()
            offsets.update(zip((problem.buffers[i].id for i in arrays.source.tolist()), values, strict=True))
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)
