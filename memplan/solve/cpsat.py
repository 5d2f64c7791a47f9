"""`cpsat`: the exact solver, on Google OR-tools' CP-SAT. For small problems; the oracle of our tests."""

from __future__ import annotations

import time

from memplan.problem import Problem, Solution
from memplan.solve.base import NO_LIMITS, finish
from memplan.solve.budget import Budget, Limits
from memplan.solve.greedy import Greedy


class CPSAT:
    """Minimises the arena; proves it when the limits allow."""

    name = "cpsat"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: Limits = NO_LIMITS, seed: int = 0) -> Solution:
        import numpy as np

        from memplan.solve.core import core_of
        from memplan.solve.cpsat_model import minimise
        from memplan.solve.instance import Outcome

        began = time.perf_counter()
        start = Greedy().solve(problem)
        core = core_of(problem)
        if not core.n:
            return finish(problem, start.offsets, solver=self.name, seconds=time.perf_counter() - began)
        hint = np.array([start.offsets[problem.buffers[i].id] // core.unit for i in core.source.tolist()], np.int64)
        outcome, offsets, bound = minimise(core, hint, Budget(limits))
        found = dict(start.offsets)
        if outcome is Outcome.SOLVED:
            values = (offsets * core.unit).tolist()
            found.update(zip((problem.buffers[i].id for i in core.source.tolist()), values, strict=True))
        return finish(problem, found, solver=self.name, seconds=time.perf_counter() - began, bound=bound)
