"""Chooses the offset of every buffer: `solve` runs a solver, and validates its solution before it returns it.

The default is `portfolio`: a valid placement at once, then the smallest arena that the limits allow. Heuristics run
first. If the arena equals the lower bound, it is proven optimal. Otherwise the search tries the bound itself as the
capacity, then smaller and smaller capacities below the best arena (`capacity_search.py`). A capacity that the search
exhausts raises the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from memplan.core.arguments import require_kind
from memplan.core.problem import Buffer, Problem, Solution
from memplan.core.validate import validate
from memplan.errors import InvalidProblem, UnsupportedProblem
from memplan.solvers import thresholds
from memplan.solvers.base import NO_LIMITS, Progress, Solver, SolverLimits, WorkBudget, finish
from memplan.solvers.baselines import GREEDY, RULES


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
        # numpy is imported only now, and numba where a search must follow: most small problems need neither.
        from memplan.solvers.arrays import make_problem_arrays
        from memplan.solvers.capacity_search import CapacitySearch

        arrays = make_problem_arrays(problem)
        search = CapacitySearch(arrays, problem, budget, limits)
        search.run(seed)
        offsets = search.named(problem)
        return finish(problem, offsets, solver=self.name, seconds=budget.seconds, bound=search.bound)


def _is_enough(problem: Problem, arena: int, limits: SolverLimits) -> bool:
    return not limits.minimize and problem.capacity is not None and arena <= problem.capacity


_ALL: tuple[Solver, ...] = (Portfolio(), *RULES)
SOLVERS: Mapping[str, Solver] = {solver.name: solver for solver in _ALL}
DEFAULT = "portfolio"
_BUFFERS = "give a Problem, or its buffers; memplan.csvio.read_problem(path) reads a file of them"
_MOST = 1 << 60  # bytes, steps: sums of a few of them must stay within 64 bits


def select_solver(problem: Problem, solver: str | Solver = "auto") -> Solver:
    """The solver that `solve` would run on `problem`.

    Raises `UnsupportedProblem` if the name is unknown or the solver cannot solve the problem.
    """
    found = solver_of(solver)
    reason = found.refuses(problem)
    if reason is not None:
        raise UnsupportedProblem(f"solver {found.name!r} does not take it: {reason}", hint="use solver='auto'")
    return found


def solver_of(solver: str | Solver) -> Solver:
    """Return the solver of that name, or the given solver itself. Raises `UnsupportedProblem` for anything else."""
    if isinstance(solver, str):
        name = DEFAULT if solver == "auto" else solver
        if name not in SOLVERS:
            what = f"there is no solver {solver!r}"
            raise UnsupportedProblem(what, hint=f"choose one of: auto, {', '.join(SOLVERS)}")
        return SOLVERS[name]
    if not isinstance(solver, Solver):
        raise UnsupportedProblem(f"{solver!r} is no solver", hint="give a name, or an object with solve and refuses")
    return solver


def solve(
    problem: Problem | Iterable[Buffer],
    *,
    capacity: int | None = None,
    time_limit: float | None = None,
    work_limit: int | None = None,
    minimize: bool | None = None,
    solver: str | Solver = "auto",
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Assign an offset to every buffer, and check the result with the independent validator.

    Without a time limit, equal input and seed give an equal solution, byte for byte.

    Args:
        problem: a `Problem`, or its buffers; sizes in bytes, live intervals in steps.
        capacity: the most bytes that the arena may have; it replaces that of the problem. None keeps that.
        time_limit: seconds of wall time; None for no limit.
        work_limit: units of work, independent of the machine; None for no limit, or for the default limit if
            `time_limit` is None too.
        minimize: whether to look for the smallest arena. If False, the first placement within the capacity is
            returned. None means True without a capacity, and False with one.
        solver: "auto", the name of a solver (a key of `memplan.solvers.SOLVERS`), or an object with the methods of one.
        seed: the seed of random choices.
        on_progress: called with every better arena or bound.

    Returns:
        Offsets and arena size in bytes, with the status and the proven lower bound. If no placement within the capacity
        was found, the status is INFEASIBLE or UNKNOWN.

    Raises:
        UnsupportedProblem: the solver is unknown or cannot solve the problem.
        InvalidProblem: two pinned buffers overlap, or a limit is negative or not a number, or sizes are too large.
        InvalidSolution: the solver returned an invalid solution (a bug of the solver).

    Example:
        >>> buffers = [
        ...     Buffer(id="a", size=4096, live=Interval(0, 3)),
        ...     Buffer(id="b", size=512, live=Interval(2, 9)),
        ... ]
        >>> memplan.solve(buffers).arena_size
        4608
    """
    if not isinstance(problem, Problem):
        buffers: tuple[Any, ...] = tuple(problem) if isinstance(problem, Iterable) else (problem,)
        for buffer in buffers:
            require_kind(buffer, Buffer, "solve", _BUFFERS)
        problem = Problem(buffers=buffers, capacity=capacity)
    elif capacity is not None:
        problem = Problem(buffers=problem.buffers, capacity=capacity)
    check_numbers(problem, time_limit, work_limit)
    check_pins(problem)
    if minimize is None:
        minimize = problem.capacity is None
    limits = SolverLimits(seconds=time_limit, work=work_limit, minimize=minimize, on_progress=on_progress)
    solution = select_solver(problem, solver).solve(problem, limits=limits, seed=seed)
    validate(problem, solution)
    return solution


def check_numbers(problem: Problem, time_limit: float | None, work_limit: int | None) -> None:
    """Raise `InvalidProblem` for invalid limits, and for sizes and steps that are too large for 64-bit arithmetic."""
    require_limit("time_limit", time_limit)
    require_limit("work_limit", work_limit)
    sizes, alignments, lives, pins = (
        map(attrgetter(name), problem.buffers) for name in ("size", "alignment", "live", "pinned_offset")
    )
    naive = sum(sizes) + max(alignments, default=1) * len(problem.buffers) + max(filter(None, pins), default=0)
    first = min(map(attrgetter("live.start"), problem.buffers), default=0)
    steps = max(max(map(attrgetter("end"), lives), default=0), -first)
    if max(naive, steps) > _MOST:
        raise InvalidProblem(
            f"sizes with their padding add up to {naive}, steps go to {steps}: more than {_MOST}",
            where="buffers",
            hint="count sizes in larger units and number the steps from 0",
        )


def require_limit(where: str, limit: float | None) -> None:
    """Raise `InvalidProblem` for a limit that is neither None nor a number from 0 upwards."""
    if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0):
        raise InvalidProblem(f"{limit} is not a number from 0 upwards", where=where, hint="leave it out for no limit")


def check_pins(problem: Problem) -> None:
    """Raise `InvalidProblem` naming two pinned buffers that are alive together and overlap."""
    pinned = [(b.pinned_offset, b) for b in problem.buffers if b.pinned_offset is not None and b.size]
    pinned.sort(key=lambda entry: entry[0])
    for place, (low, one) in enumerate(pinned):
        for other_low, other in pinned[place + 1 :]:
            if other_low >= low + one.size:
                break
            if any(not a.is_disjoint(b) for a in one.segments for b in other.segments):
                raise InvalidProblem(
                    f"is pinned to {other_low}, inside the bytes pinned for {one.id!r}",
                    where=f"buffer {other.id!r}",
                    hint="buffers that are alive together need pinned ranges that do not overlap",
                )
