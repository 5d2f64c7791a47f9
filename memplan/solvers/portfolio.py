"""`portfolio`, the default: a valid placement at once, then the smallest arena that the limits allow.

Heuristics run first. If the arena equals the lower bound, it is proven optimal. Otherwise the search tries the bound
itself as the capacity, then smaller and smaller capacities below the best arena. A capacity that the search exhausts
raises the bound.
"""

from __future__ import annotations

from memplan.core.problem import Problem, Solution
from memplan.solvers import thresholds
from memplan.solvers.base import NO_LIMITS, Progress, SolverLimits, WorkBudget, finish
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
            if enough:
                found = finish(problem, quick.offsets, solver=self.name, seconds=budget.seconds)
                if limits.on_progress is not None:
                    limits.on_progress(Progress(incumbent=found.arena_size, bound=found.bound, seconds=found.seconds))
                return found
        # numpy and numba are imported only now: most small problems never need them.
        from memplan.solvers.arrays import make_problem_arrays
        from memplan.solvers.capacity_search import CapacitySearch

        arrays = make_problem_arrays(problem)
        search = CapacitySearch(arrays, problem, budget, limits)
        search.run(seed)
        offsets = search.named(problem)
        return finish(problem, offsets, solver=self.name, seconds=budget.seconds, bound=search.bound)


def _is_enough(problem: Problem, arena: int, limits: SolverLimits) -> bool:
    return not limits.minimize and problem.capacity is not None and arena <= problem.capacity
