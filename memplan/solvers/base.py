"""The protocol of solvers, and the functions that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from memplan.core.problem import Infeasibility, Problem, Solution, Status
from memplan.solvers.limits import SolverLimits


@runtime_checkable
class Solver(Protocol):
    """A method of assigning offsets. It is deterministic: ties are broken by definition order."""

    @property
    def name(self) -> str:
        """The solver's name on the command line and in plans."""
        ...

    def refuses(self, problem: Problem) -> str | None:
        """The reason that this solver cannot solve `problem` (pinned offsets, ...), or None if it can."""
        ...

    def solve(self, problem: Problem, *, limits: SolverLimits = ..., seed: int = ...) -> Solution:
        """Place every buffer. A heuristic that needs no limits ignores them; `seed` is that of random choices."""
        ...


NO_LIMITS = SolverLimits()


def finish(problem: Problem, offsets: Mapping[str, int], *, solver: str, seconds: float, bound: int = 0) -> Solution:
    """Make a solution from offsets (bytes): it computes the arena size, and the status from the capacity and the bound.

    `bound` is a proven lower bound of the arena, bytes, if the solver knows a better one than max live. If the bound is
    above the capacity, the status is INFEASIBLE; if max live is, the proof names the step and the buffers.
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
    """The step and the buffers alive there that need more than the capacity; None if max live fits."""
    if problem.capacity is None or problem.max_live <= problem.capacity:
        return None
    alive = tuple(b.id for b in problem.alive_at(problem.peak_step) if b.size)
    return Infeasibility(step=problem.peak_step, ids=alive, needed=problem.max_live)


def align_up(offset: int, alignment: int) -> int:
    """`offset` rounded up to a multiple of `alignment`, bytes."""
    return -(-offset // alignment) * alignment
