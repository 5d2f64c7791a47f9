"""`portfolio`, the default: a valid placement at once, then the smallest arena that the limits allow.

Heuristics run first. If the arena equals the lower bound, it is proven optimal. Otherwise the search tries the bound
itself as the capacity, then smaller and smaller capacities below the best arena. A capacity that the search exhausts
raises the bound. The validator checks every placement before it is
kept: a bug in a heuristic loses its placement, not the plan.
"""

from __future__ import annotations

import time

from memplan.core.problem import Problem, Solution
from memplan.solvers import thresholds
from memplan.solvers.base import NO_LIMITS, Progress, SolverLimits, WorkBudget, finish, refusal, warn_of_fault
from memplan.solvers.baselines import GREEDY


class Portfolio:
    """Solves every problem by heuristics and search, within the limits."""

    name = "portfolio"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        budget = WorkBudget(limits)
        if len(problem.buffers) <= thresholds.SMALL:
            quick = GREEDY.solve(problem)
            enough = quick.arena_size <= problem.max_live or _is_enough(problem, quick.arena_size, limits)
            reason = refusal(problem, quick.offsets) if enough else None
            if reason is not None:
                warn_of_fault(f"greedy gave a placement that the validator refuses: {reason}")
            elif enough:
                found = finish(problem, quick.offsets, solver=self.name, seconds=budget.seconds)
                if limits.on_progress is not None:
                    limits.on_progress(Progress(incumbent=found.arena_size, bound=found.bound, seconds=found.seconds))
                return found
        # numpy and numba are imported only now: most small problems never need them.
        from memplan.solvers.arrays import make_problem_arrays
        from memplan.solvers.capacity_search import Answers, CapacitySearch

        arrays = make_problem_arrays(problem)
        answers = Answers(problem, arrays)
        search = CapacitySearch(arrays, answers, problem, budget, limits)
        search.run(seed)
        offsets = answers.named(answers.offsets)
        return finish(problem, offsets, solver=self.name, seconds=budget.seconds, bound=search.bound)


def _is_enough(problem: Problem, arena: int, limits: SolverLimits) -> bool:
    return not limits.minimize and problem.capacity is not None and arena <= problem.capacity


class CPSAT:
    """Minimizes the arena, and proves it optimal if the limits suffice."""

    name = "cpsat"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        import numpy as np

        from memplan.solvers.arrays import PieceOutcome, make_problem_arrays
        from memplan.solvers.cpsat_model import minimise

        began = time.perf_counter()
        start = GREEDY.solve(problem)
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
