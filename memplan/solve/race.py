"""The race of the portfolio: the best arena so far and the proven bound, brought together."""

from __future__ import annotations

from memplan.problem import Problem
from memplan.solve import squeaky, thresholds
from memplan.solve.accept import warn_of_fault
from memplan.solve.answers import Answers
from memplan.solve.attempt import attempt
from memplan.solve.bounds import lower_bound
from memplan.solve.budget import Budget, Limits, Progress
from memplan.solve.core import Core, Ints
from memplan.solve.eject import Learnt
from memplan.solve.instance import Outcome
from memplan.solve.quick import first_answers

# Of the budget: on the capacity if that is enough, else on the bound itself (of large problems).
_FIT_SHARE, _FIRST_SHARE, _LARGE_SHARE = 0.95, 0.1, 0.6
_PROMOTE_SHARE = 0.7  # of what is left then, on large problems
_STEPS = (0.85, 0.7, 0.5, 0.25, 0.0)  # the next capacity, between the bound (0) and the best arena (1)
_SEARCH_SHARE = 0.7  # of the budget before CP-SAT


class Race:
    """The best placement so far and the bound, which `run` brings together as far as the budget goes."""

    def __init__(self, core: Core, answers: Answers, problem: Problem, budget: Budget, limits: Limits) -> None:
        self.core, self.answers, self.budget, self.limits = core, answers, budget, limits
        self.capacity, self.max_live = problem.capacity, problem.max_live
        self.bound = lower_bound(core)

    @property
    def arena(self) -> int | None:
        """Bytes of the arena of the best valid placement so far; None before there is one."""
        return self.answers.arena

    def run(self, seed: int) -> None:
        """Heuristics, then capacities from the bound upwards."""
        if not self.core.n:
            return
        for offsets in first_answers(self.core):
            self._offer(offsets, "quick.first_answers")
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
            share = _LARGE_SHARE if self.core.n > thresholds.LARGE else _FIRST_SHARE
            self._try(self.bound, self.budget.share(share), seed)
        if self.core.n > thresholds.LARGE and not self._is_done():
            self._promote(self.budget.share(_PROMOTE_SHARE))
        self._descend(self.budget.share(_SEARCH_SHARE) if self._is_small() else self.budget, seed)
        if self._is_small():
            self._close()

    def _fall_back(self) -> bool:
        """Answer by the simplest means, for when every heuristic was refused."""
        return any(self._offer(offsets, source) for source, offsets in self.answers.simple())

    def _is_small(self) -> bool:
        return self.core.n <= thresholds.EXACT

    def _close(self) -> None:
        """Hand what is open to CP-SAT: is there anything below the best arena?"""
        while not self._is_done() and not self.budget.is_over:
            assert self.arena is not None
            outcome = self._try(self.arena - 1, self.budget, 0, hint=self.answers.offsets)
            if outcome is Outcome.LIMIT:
                return

    def _promote(self, budget: Budget) -> None:
        goal = self.core.max_offset(self.bound)
        for offsets in squeaky.rounds(self.core, goal, budget):
            self._offer(offsets, "squeaky.rounds")
            if self._is_done():
                return

    def _descend(self, budget: Budget, seed: int) -> None:
        """Capacities between the bound and the best arena. Small steps first, larger ones after success.

        Small steps under little effort soon reach the region where the effort must be doubled again and again.
        """
        effort, step = thresholds.EFFORT, 0
        memory: dict[bytes, Learnt] = {}
        while not self._is_done() and not budget.is_over:
            assert self.arena is not None
            goal = self.bound + int((self.arena - 1 - self.bound) * _STEPS[step])
            seed += 1
            if self._try(goal, budget.slice(effort), seed, memory=memory) is not Outcome.LIMIT:
                step = min(step + 1, len(_STEPS) - 1)
            elif step:
                step = 0
            else:
                effort *= 2

    def _try(
        self,
        capacity: int,
        budget: Budget,
        seed: int,
        *,
        hint: Ints | None = None,
        memory: dict[bytes, Learnt] | None = None,
    ) -> Outcome:
        outcome, offsets = attempt(self.core, self.core.max_offset(capacity), budget, seed, hint=hint, memory=memory)
        if outcome is Outcome.SOLVED and not self._offer(offsets, "attempt.attempt"):
            if memory is not None:  # it may be wrong too
                memory.clear()
            return Outcome.LIMIT
        if outcome is Outcome.EXHAUSTED:
            exact = bool((self.core.raw % self.core.unit == 0).all())
            above = (capacity // self.core.unit + 1) * self.core.unit if exact else capacity + 1
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
