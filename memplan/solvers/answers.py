"""`Answers`: keeps the best valid placement that the portfolio has so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from memplan.core.problem import Problem
from memplan.solvers import thresholds
from memplan.solvers.accept import refusal, warn_of_fault
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays
from memplan.solvers.arrays.sequence import in_order
from memplan.solvers.baselines.greedy import by_size
from memplan.solvers.baselines.naive import Naive


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
        yield "naive", self._in_units(Naive().solve(problem).offsets)

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
