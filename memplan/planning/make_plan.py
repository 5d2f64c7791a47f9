"""Places a scheduled graph in an arena: the last step of making a plan."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule
from memplan.solvers import Solver, solve


def make_plan(
    *,
    model: str,
    graph: Graph,
    schedule: Schedule,
    alignment: int,
    versions: Mapping[str, str],
    redzone: int = 0,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Plan:
    """Make the plan of a scheduled graph: an offset in bytes for every planned storage.

    `alignment` and `redzone` are in bytes, `time_limit` in seconds. Raises `InvalidSolution` if the solver returns an
    invalid placement.
    """
    problem = lifetimes.problem(graph, schedule, alignment=alignment, redzone=redzone)
    return Plan(
        model=model,
        graph=graph,
        schedule=schedule,
        problem=problem,
        solution=solve(problem, solver=solver, time_limit=time_limit),
        alignment=alignment,
        redzone=redzone,
        versions=versions,
    )
