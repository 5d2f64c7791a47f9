"""`portfolio`, the default: a valid placement at once, then the smallest arena that the limits allow.

Heuristics first; if the arena meets the lower bound, that is the proof. Otherwise the search tries the bound
itself as the capacity, then smaller and smaller capacities below the best arena. A capacity that the search
exhausts raises the bound. What is still open goes to CP-SAT when it is small enough (`cpsat.py`).
"""

from __future__ import annotations

from memplan.problem import Problem, Solution
from memplan.solve.base import NO_LIMITS, finish
from memplan.solve.budget import Budget, Limits, Progress
from memplan.solve.greedy import Greedy

_SMALL = 400  # buffers: up to here plain Python greedy is tried before numba is even imported


class Portfolio:
    """Takes every problem."""

    name = "portfolio"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: Limits = NO_LIMITS, seed: int = 0) -> Solution:
        budget = Budget(limits)
        if len(problem.buffers) <= _SMALL:
            quick = Greedy().solve(problem)
            if quick.arena_size == problem.max_live or _is_enough(problem, quick.arena_size, limits):
                found = finish(problem, quick.offsets, solver=self.name, seconds=budget.seconds)
                if limits.on_progress is not None:
                    limits.on_progress(Progress(incumbent=found.arena_size, bound=found.bound, seconds=found.seconds))
                return found
        # numpy and numba are imported only now: most small problems never need them.
        from memplan.solve.core import core_of
        from memplan.solve.race import Race

        core = core_of(problem)
        race = Race(core, problem.capacity, budget, limits)
        race.run(seed)
        offsets = {b.id: b.pinned_offset or 0 for b in problem.buffers}
        values = (race.offsets * core.unit).tolist()
        offsets.update(zip((problem.buffers[i].id for i in core.source.tolist()), values, strict=True))
        return finish(problem, offsets, solver=self.name, seconds=budget.seconds, bound=race.bound)


def _is_enough(problem: Problem, arena: int, limits: Limits) -> bool:
    return not limits.minimize and problem.capacity is not None and arena <= problem.capacity
