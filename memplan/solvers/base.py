"""What every solver is, and the two steps that all share: start from a problem, end with a solution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from memplan.core.problem import Infeasibility, Problem, Solution, Status
from memplan.solvers.limits import SolverLimits


@runtime_checkable
class Solver(Protocol):
    """One way to assign offsets. Deterministic: ties break by definition order."""

    @property
    def name(self) -> str:
        """The word for it on the command line and in plans."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """Why this solver does not take `problem` (pinned offsets, gaps, ...), or None when it does."""
        ...

    def solve(self, problem: Problem, *, limits: SolverLimits = ..., seed: int = ...) -> Solution:
        """Place every buffer. A heuristic that needs no limits ignores them; `seed` is for random choices."""
        ...


NO_LIMITS = SolverLimits()


def finish(problem: Problem, offsets: Mapping[str, int], *, solver: str, seconds: float, bound: int = 0) -> Solution:
    """A solution from offsets: the arena is measured, the status follows from it, the capacity and the bound.

    `bound` is a proven lower bound in bytes if the solver knows a better one than max live. Above the
    capacity, a bound makes the problem INFEASIBLE, and max live names the step and the buffers.
    """
    bound = max(bound, problem.max_live)
    arena = max((offsets[b.id] + b.size for b in problem.buffers), default=0)
    proof = None
    if problem.capacity is not None and bound > problem.capacity:
        status, proof = Status.INFEASIBLE, infeasible_step(problem)
    elif problem.capacity is not None and arena > problem.capacity:
        status = Status.UNKNOWN
    elif arena == bound:
        status = Status.OPTIMAL
    else:
        status = Status.FEASIBLE
    return Solution(
        offsets=offsets, arena_size=arena, status=status, bound=bound, solver=solver, seconds=seconds, proof=proof
    )


def infeasible_step(problem: Problem) -> Infeasibility | None:
    """The step, and the buffers alive there, that need more than the capacity; None when max live fits."""
    if problem.capacity is None or problem.max_live <= problem.capacity:
        return None
    alive = tuple(b.id for b in problem.alive_at(problem.peak_step) if b.size)
    return Infeasibility(step=problem.peak_step, ids=alive, needed=problem.max_live)


def align_up(offset: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `offset`, bytes."""
    return -(-offset // alignment) * alignment
