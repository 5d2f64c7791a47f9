"""`cpsat`: the exact solver, on CP-SAT of Google OR-Tools. It is for small problems, and the reference in tests."""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.baselines.greedy import Greedy
from memplan.solvers.limits import Budget, SolverLimits


class CPSAT:
    """Minimizes the arena, and proves it optimal if the limits suffice."""

    name = "cpsat"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        import numpy as np

        from memplan.solvers.arrays.instance import PieceOutcome
        from memplan.solvers.arrays.problem_arrays import core_of
        from memplan.solvers.search.cpsat_model import minimise

        began = time.perf_counter()
        start = Greedy().solve(problem)
        core = core_of(problem)
        if not core.n:
            return finish(problem, start.offsets, solver=self.name, seconds=time.perf_counter() - began)
        hint = np.array([start.offsets[problem.buffers[i].id] // core.unit for i in core.source.tolist()], np.int64)
        outcome, offsets, bound = minimise(core, hint, Budget(limits))
        found = dict(start.offsets)
        if outcome is PieceOutcome.SOLVED:
            values = (offsets * core.unit).tolist()
            found.update(zip((problem.buffers[i].id for i in core.source.tolist()), values, strict=True))
        return finish(problem, found, solver=self.name, seconds=time.perf_counter() - began, bound=bound)
