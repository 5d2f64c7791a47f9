"""Narrows the gap between the best arena and the proven bound, by searching at capacities between them."""

from __future__ import annotations

import numpy as np

from memplan.core.problem import Problem
from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, lower_bound
from memplan.solvers.base import Progress, SolverLimits, WorkBudget
from memplan.solvers.heuristics import first_answers
from memplan.solvers.solve_at_capacity import attempt

_FIT_SHARE, _FIRST_SHARE = 0.95, 0.1  # shares of the budget: for a capacity that is enough, and for the bound
_STEPS = (85, 70, 50, 25, 0)  # percent: the next capacity is below this point between the bound and the best arena


class CapacitySearch:
    """Keeps the best placement and the proven bound; `run` narrows the gap until the budget is spent."""

    def __init__(self, arrays: ProblemArrays, problem: Problem, budget: WorkBudget, limits: SolverLimits) -> None:
        self.arrays, self.budget, self.limits = arrays, budget, limits
        self.capacity = problem.capacity
        self.bound = lower_bound(arrays)
        self.offsets: Ints = np.zeros(arrays.n, np.int64)  # units
        self.arena: int | None = None  # bytes

    def named(self, problem: Problem) -> dict[str, int]:
        """Return the best offsets as id -> offset in bytes, with the buffers of size 0."""
        found = {b.id: b.pinned_offset or 0 for b in problem.buffers}
        values = (self.offsets * self.arrays.unit).tolist()
        found.update(zip((problem.buffers[i].id for i in self.arrays.source.tolist()), values, strict=True))
        return found

    def run(self, seed: int) -> None:
        """Run the heuristics, then the search at capacities from the bound upwards."""
        if not self.arrays.n:
            return
        for offsets in first_answers(self.arrays):
            self._offer(offsets)
            if self._is_done():
                return
        if self.capacity is not None and self.capacity < self.bound:
            return
        if self.capacity is not None and not self.limits.minimize:
            self._try(self.capacity, self.budget.share(_FIT_SHARE), seed)
        else:
            self._try(self.bound, self.budget.share(_FIRST_SHARE), seed)
        self._descend(self.budget, seed)

    def _descend(self, budget: WorkBudget, seed: int) -> None:
        """Search at capacities between the bound and the best arena: small steps first, larger ones after success.

        Small steps with little effort soon reach the capacities for which the effort must be doubled repeatedly.
        """
        effort, step = thresholds.EFFORT, 0
        while not self._is_done() and not budget.is_over:
            assert self.arena is not None
            # A share that is rounded up, less one byte: of scaled sizes, the goal is the same in units.
            goal = self.bound + max(-((self.bound - self.arena) * _STEPS[step] // 100) - 1, 0)
            seed += 1
            outcome = self._try(goal, budget.slice(effort), seed)
            if outcome is PieceOutcome.LARGE:  # the heuristics give the same again
                return
            if outcome is not PieceOutcome.LIMIT:
                step = min(step + 1, len(_STEPS) - 1)
            elif step:
                step = 0
            else:
                effort *= 2

    def _try(self, capacity: int, budget: WorkBudget, seed: int) -> PieceOutcome:
        outcome, offsets = attempt(self.arrays, self.arrays.max_offset(capacity), budget, seed)
        if outcome is PieceOutcome.LIMIT and (offsets >= 0).all():
            self._offer(offsets)
        if outcome is PieceOutcome.SOLVED and not self._offer(offsets):
            return PieceOutcome.LIMIT
        if outcome is PieceOutcome.EXHAUSTED:
            exact = bool((self.arrays.raw % self.arrays.unit == 0).all())
            above = (capacity // self.arrays.unit + 1) * self.arrays.unit if exact else capacity + 1
            self.bound = max(self.bound, above)
            self._report()
        return outcome

    def _offer(self, offsets: Ints) -> bool:
        """Keep a placement if its arena is the smallest so far; returns whether it is."""
        arena = int((offsets * self.arrays.unit + self.arrays.raw).max())
        if self.arena is not None and arena >= self.arena:
            return False
        self.arena, self.offsets = arena, offsets.copy()
        self._report()
        return True

    def _is_done(self) -> bool:
        if self.arena is None:
            return False
        if not self.limits.minimize and self.capacity is not None and self.arena <= self.capacity:
            return True
        return self.arena <= self.bound or (self.capacity is not None and self.capacity < self.bound)

    def _report(self) -> None:
        if self.limits.on_progress is not None:
            self.limits.on_progress(Progress(incumbent=self.arena, bound=self.bound, seconds=self.budget.seconds))
