"""Has what all solvers share: the protocol, the limits in time and work, and how an answer is made and checked.

Work is counted in *units* that do not depend on the machine: a unit is one node of the search on up to 200 buffers, and
a node on more buffers counts in proportion. A run that is limited by work alone is exactly reproducible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from memplan.core.problem import Infeasibility, Problem, Solution, Status

NODE_BUFFERS = 200
DEFAULT_WORK = 1_000_000  # units when neither time nor work is limited: about four seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a solver: the best arena so far and a proven bound, bytes, and the seconds since the start.

    `incumbent` is None before the first placement.
    """

    incumbent: int | None
    bound: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """The limits of a solver: `seconds` of wall time and `work` in units; None for both means `DEFAULT_WORK` units.

    With a limit of zero, only heuristics run. Without `minimize`, a solver stops at the first placement within the
    problem's capacity. `on_progress` is called with every better arena or bound.
    """

    seconds: float | None = None
    work: int | None = None
    minimize: bool = True
    on_progress: Callable[[Progress], None] | None = None


class WorkBudget:
    """Counts work and time against the limits. `share` and `slice` make a budget over a part of the rest."""

    def __init__(self, limits: SolverLimits) -> None:
        self.began = time.perf_counter()
        self._deadline = None if limits.seconds is None else self.began + limits.seconds
        self._timed = limits.seconds is not None
        self._work = DEFAULT_WORK if limits.work is None and limits.seconds is None else limits.work
        self._parent: WorkBudget | None = None
        self.spent = 0

    @property
    def seconds(self) -> float:
        """Wall time since the start, seconds."""
        return time.perf_counter() - self.began

    @property
    def is_over(self) -> bool:
        """Whether the work or the time is spent, here or in an enclosing budget."""
        if self._work is not None and self.spent >= self._work:
            return True
        if self._deadline is not None and time.perf_counter() >= self._deadline:
            return True
        return self._parent is not None and self._parent.is_over

    def remaining_work(self) -> int | None:
        """Units of work that are left; None if only time is limited."""
        return None if self._work is None else max(0, self._work - self.spent)

    def nodes(self, wanted: int, buffers: int) -> int:
        """The number of `wanted` search nodes, on a piece of `buffers`, that may run before the next call."""
        cost = max(1.0, buffers / NODE_BUFFERS)
        if self._timed:
            wanted = min(wanted, int(20_000 / cost) + 1)
        budget: WorkBudget | None = self
        while budget is not None:
            if budget._work is not None:
                wanted = min(wanted, int((budget._work - budget.spent) / cost) + 1)
            budget = budget._parent
        return max(1, wanted)

    def spend(self, nodes: int, buffers: int) -> None:
        """Count the work of `nodes` search nodes on a piece of `buffers`."""
        units = int(nodes * max(1.0, buffers / NODE_BUFFERS)) + 1
        budget: WorkBudget | None = self
        while budget is not None:
            budget.spent += units
            budget = budget._parent

    def slice(self, work: int) -> WorkBudget:
        """A budget of `work` units, or of the rest if that is less; work spent in it is also spent here."""
        inner = self.share(1.0)
        inner._work = work if inner._work is None else min(work, inner._work)
        return inner

    def share(self, part: float) -> WorkBudget:
        """A budget of the share `part` (0 to 1) of the rest; work spent in it is also spent here."""
        inner = object.__new__(WorkBudget)
        now = time.perf_counter()
        inner.began, inner.spent, inner._parent, inner._timed = now, 0, self, self._timed
        inner._deadline = None if self._deadline is None else now + part * max(0.0, self._deadline - now)
        left = self.remaining_work()
        inner._work = None if left is None else int(part * left)
        return inner


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
