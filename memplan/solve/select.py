"""Which solver runs, and the one door through which every solution leaves: solved, validated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memplan.errors import UnsupportedProblem
from memplan.problem import Buffer, Problem, Solution
from memplan.solve.base import Solver
from memplan.solve.greedy import Greedy
from memplan.solve.naive import Naive
from memplan.solve.partition import Partition
from memplan.validate import validate

SOLVERS: Mapping[str, Solver] = {solver.name: solver for solver in (Greedy(), Naive(), Partition())}
DEFAULT = "greedy"


def select_solver(problem: Problem, solver: str | Solver = "auto") -> Solver:
    """The solver that would run on `problem`.

    Raises `UnsupportedProblem` when the name is unknown or the solver does not take the problem.
    """
    if isinstance(solver, str):
        name = DEFAULT if solver == "auto" else solver
        if name not in SOLVERS:
            raise UnsupportedProblem(
                f"there is no solver {solver!r}", hint=f"choose one of: auto, {', '.join(SOLVERS)}"
            )
        solver = SOLVERS[name]
    reason = solver.refuses(problem)
    if reason is not None:
        raise UnsupportedProblem(f"solver {solver.name!r} does not take it: {reason}", hint="use solver='auto'")
    return solver


def solve(
    problem: Problem | Iterable[Buffer],
    *,
    capacity: int | None = None,
    time_limit: float | None = None,
    solver: str | Solver = "auto",
    seed: int = 0,
) -> Solution:
    """Assign an offset (bytes) to every buffer; the result has passed the independent validator.

    `problem` is a `Problem` or buffers; `capacity` (bytes) overrides the problem's; `time_limit` is in
    seconds. Raises `UnsupportedProblem` for a solver that is unknown or does not take the problem, and
    `InvalidSolution` if a solver returned nonsense (a bug; never silently accepted).
    """
    if not isinstance(problem, Problem):
        problem = Problem(buffers=tuple(problem), capacity=capacity)
    elif capacity is not None:
        problem = Problem(buffers=problem.buffers, capacity=capacity)
    solution = select_solver(problem, solver).solve(problem, time_limit=time_limit, seed=seed)
    validate(problem, solution)
    return solution
