"""`cpsat`: the exact solver, on CP-SAT of Google OR-Tools. It is for small problems, and the reference in tests."""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers.base import NO_LIMITS, finish
from memplan.solvers.baselines.greedy import Greedy
from memplan.solvers.limits import SolverLimits, WorkBudget


class CPSAT:
    """Minimizes the arena, and proves it optimal if the limits suffice."""

    name = "cpsat"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        import numpy as np

        from memplan.solvers.arrays.instance import PieceOutcome
        from memplan.solvers.arrays.problem_arrays import make_problem_arrays
        from memplan.solvers.search.cpsat_model import minimise

        began = time.perf_counter()
        start = Greedy().solve(problem)
        arrays = make_problem_arrays(problem)
        if not arrays.n:
            return finish(problem, start.offsets, solver=self.name, seconds=time.perf_counter() - began)
        hint = np.array([start.offsets[problem.buffers[i].id] // arrays.unit for i in arrays.source.tolist()], np.int64)
        outcome, offsets, bound = minimise(arrays, hint, WorkBudget(limits))
        found = dict(start.offsets)
        if outcome is PieceOutcome.SOLVED:
            values = (offsets * arrays.unit).tolist()
            found.update(zip((problem.buffers[i].id for i in arrays.source.tolist()), values, strict=True))
        return finish(problem, found, solver=self.name, seconds=time.perf_counter() - began, bound=bound)
