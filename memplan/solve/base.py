"""What every solver is, and the two steps that all share: start from a problem, end with a solution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from memplan.problem import Problem, Solution, Status


class Solver(Protocol):
    """One way to assign offsets. Deterministic: ties break by definition order."""

    @property
    def name(self) -> str:
        """The word for it on the command line and in plans."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver does not take `problem` (pinned offsets, gaps, ...), or None when it does."""
        ...

    def solve(self, problem: Problem, *, time_limit: float | None, seed: int) -> Solution:
        """Place every buffer. `time_limit` is in seconds; a heuristic that needs none ignores it."""
        ...


def finish(problem: Problem, offsets: Mapping[str, int], *, solver: str, seconds: float) -> Solution:
    """A solution from offsets: the arena is measured, the bound is max live, the status follows from both."""
    arena = max((offsets[b.id] + b.size for b in problem.buffers), default=0)
    if problem.capacity is not None and arena > problem.capacity:
        status = Status.UNKNOWN
    elif arena == problem.max_live:
        status = Status.OPTIMAL
    else:
        status = Status.FEASIBLE
    return Solution(
        offsets=offsets, arena_size=arena, status=status, bound=problem.max_live, solver=solver, seconds=seconds
    )


def align_up(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `offset`, bytes."""
    return -(-offset // alignment) * alignment
