"""Narrows the gap between the best arena and the proven bound, by searching at capacities between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from memplan.core.problem import Problem
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, lower_bound
from memplan.solvers.base import Progress, SolverLimits, WorkBudget, refusal, warn_of_fault
from memplan.solvers.baselines import NAIVE, by_size, in_order
from memplan.solvers.heuristics import first_answers, first_fit_work
from memplan.solvers.solve_at_capacity import attempt


class Answers:
    """Keeps the smallest placement that the validator accepts, and drops those that it refuses."""

    def __init__(self, problem: Problem, arrays: ProblemArrays) -> None:
        self._problem, self._arrays = problem, arrays
        self._refused: set[str] = set()  # sources
        self.offsets: Ints = np.zeros(arrays.n, np.int64)  # units
        self.arena: int | None = None  # bytes

    def offer(self, offsets: Ints, source: str) -> bool:
        """Keep `offsets` (units) if they are valid and the arena is smaller than before; returns whether it kept them.

        `source` names the heuristic. The first time that a placement of it is refused, the user is warned.
        """
        arena = int((offsets * self._arrays.unit + self._arrays.raw).max())
        if self.arena is not None and arena >= self.arena:
            return False
        reason = refusal(self._problem, self.named(offsets))
        if reason is not None:
            if source not in self._refused:
                warn_of_fault(f"{source} gave a placement that the validator refuses: {reason}")
            self._refused.add(source)
            return False
        self.arena, self.offsets = arena, offsets.copy()
        return True

    def simple(self) -> Iterator[tuple[str, Ints]]:
        """Yield the simplest placements (units) with their source, the smallest first, if all heuristics failed."""
        problem = self._problem
        yield "greedy", self._in_units(in_order(problem, by_size(problem)))
        if len(problem.buffers) <= thresholds.PLAIN:
            yield "greedy in plain Python", self._in_units(in_order(problem, by_size(problem), compiled=False))
        yield "naive", self._in_units(NAIVE.solve(problem).offsets)

    def _in_units(self, offsets: Mapping[str, int]) -> Ints:
        buffers = self._problem.buffers
        values = [offsets[buffers[i].id] for i in self._arrays.source.tolist()]
        return np.array(values, np.int64) // self._arrays.unit

    def named(self, offsets: Ints) -> dict[str, int]:
        """`offsets` (units) as id -> offset in bytes, with the buffers of size 0."""
        buffers = self._problem.buffers
        found = {b.id: b.pinned_offset or 0 for b in buffers}
        values = (offsets * self._arrays.unit).tolist()
        found.update(zip((buffers[i].id for i in self._arrays.source.tolist()), values, strict=True))
        return found


# Shares of the budget: for the capacity if a placement within it is enough, else for the bound (on large problems).
_FIT_SHARE, _FIRST_SHARE, _LARGE_SHARE, _HUGE_SHARE = 0.95, 0.1, 0.4, 0.6
_PROMOTE_SHARE = 0.1  # share of the rest for squeaky-wheel optimization, on large problems
_PATIENCE = 4  # rounds of it without a better placement, after which it ends
_STEPS = (0.85, 0.7, 0.5, 0.25, 0.0)  # the next capacity, between the bound (0) and the best arena (1)
_LARGE_EFFORT, _LARGE_STEP = 16, 2  # units more for each buffer, and the first step, on large problems


class CapacitySearch:
    """Keeps the best placement and the proven bound; `run` narrows the gap until the budget is spent."""

    def __init__(
        self, arrays: ProblemArrays, answers: Answers, problem: Problem, budget: WorkBudget, limits: SolverLimits
    ) -> None:
        self.arrays, self.answers, self.budget, self.limits = arrays, answers, budget, limits
        self.capacity, self.max_live = problem.capacity, problem.max_live
        self.bound = lower_bound(arrays)

    @property
    def arena(self) -> int | None:
        """The arena size of the best valid placement so far, bytes; None before the first."""
        return self.answers.arena

    def run(self, seed: int) -> None:
        """Run the heuristics, then the search at capacities from the bound upwards."""
        if not self.arrays.n:
            return
        for offsets in first_answers(self.arrays):
            self._offer(offsets, "heuristics.first_answers")
            if self._is_done():
                return
        if self.arena is None and not self._fall_back():
            return
        if self._is_done():
            return
        if self.capacity is not None and self.capacity < self.bound:
            return
        if self.capacity is not None and not self.limits.minimize:
            self._try(self.capacity, self.budget.share(_FIT_SHARE), seed)
        else:
            self._try(self.bound, self.budget.share(self._first_share()), seed)
        if self.arrays.n > thresholds.LARGE and not self._is_done():
            self._promote(self.budget.share(_PROMOTE_SHARE))
        self._descend(self.budget, seed)

    def _fall_back(self) -> bool:
        """Offer the simplest placements, after all heuristics were refused; returns whether one was valid."""
        return any(self._offer(offsets, source) for source, offsets in self.answers.simple())

    def _first_share(self) -> float:
        """The share of the budget for the bound: more where a failure there leaves no time for another capacity."""
        if self.arrays.n <= thresholds.LARGE:
            return _FIRST_SHARE
        return _LARGE_SHARE if first_fit_work(self.arrays) <= thresholds.ROUND else _HUGE_SHARE

    def _promote(self, budget: WorkBudget) -> None:
        goal, idle = self.arrays.max_offset(self.bound), 0
        for offsets in squeaky_wheel.rounds(self.arrays, goal, budget):
            idle = 0 if self._offer(offsets, "squeaky_wheel.rounds") else idle + 1
            if self._is_done() or idle == _PATIENCE:
                return

    def _descend(self, budget: WorkBudget, seed: int) -> None:
        """Search at capacities between the bound and the best arena: small steps first, larger ones after success.

        Small steps with little effort soon reach the capacities for which the effort must be doubled repeatedly.
        """
        effort, step = thresholds.EFFORT, 0
        if self.arrays.n > thresholds.LARGE:
            effort, step = effort + _LARGE_EFFORT * self.arrays.n, _LARGE_STEP
        while not self._is_done() and not budget.is_over:
            assert self.arena is not None
            goal = self.bound + int((self.arena - 1 - self.bound) * _STEPS[step])
            seed += 1
            if self._try(goal, budget.slice(effort), seed) is not PieceOutcome.LIMIT:
                step = min(step + 1, len(_STEPS) - 1)
            elif step:
                step = 0
            else:
                effort *= 2

    def _try(self, capacity: int, budget: WorkBudget, seed: int) -> PieceOutcome:
        outcome, offsets = attempt(self.arrays, self.arrays.max_offset(capacity), budget, seed)
        if outcome is PieceOutcome.LIMIT and (offsets >= 0).all():
            self._offer(offsets, "solve_at_capacity.attempt")
        if outcome is PieceOutcome.SOLVED and not self._offer(offsets, "solve_at_capacity.attempt"):
            return PieceOutcome.LIMIT
        if outcome is PieceOutcome.EXHAUSTED:
            exact = bool((self.arrays.raw % self.arrays.unit == 0).all())
            above = (capacity // self.arrays.unit + 1) * self.arrays.unit if exact else capacity + 1
            self.bound = max(self.bound, above)
            self._report()
        return outcome

    def _offer(self, offsets: Ints, source: str) -> bool:
        """Offer a placement; returns whether it is valid and the best so far."""
        if not self.answers.offer(offsets, source):
            return False
        if self.arena is not None and self.arena < self.bound:
            warn_of_fault(f"a proof that no arena is below {self.bound} bytes is refuted by one of {self.arena} bytes")
            self.bound = self.max_live
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
