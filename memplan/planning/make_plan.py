"""Places a scheduled graph in an arena: the last step of making a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.legal_orders import require_written_first
from memplan.core.plan import Plan
from memplan.core.problem import Problem, Solution
from memplan.core.schedule import Schedule
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.solvers import solve


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledGraph:
    """A graph and its order, and what the offsets of its storages have to keep.

    `model`: the name of the model in the plan. `alignment`: that of every buffer, in bytes. `redzone`: bytes to leave
    free on both sides of every buffer. `versions`: those of memplan, torch and Python, for the plan's record.
    `reserve`: bytes on the device that the step does not show, which count in the plan's total.
    """

    model: str
    graph: Graph
    schedule: Schedule
    alignment: int
    versions: Mapping[str, str]
    redzone: int = 0
    reserve: int = 0

    @classmethod
    def of(cls, plan: Plan) -> ScheduledGraph:
        """Return the graph of a plan in the plan's order, to be placed anew, without red zones."""
        kept = {field.name: getattr(plan, field.name) for field in fields(cls) if field.name != "redzone"}
        return cls(**kept)

    @property
    def problem(self) -> Problem:
        """The buffers to place, with their sizes in bytes and their live intervals in steps."""
        return lifetimes.problem(self.graph, self.schedule, alignment=self.alignment, redzone=self.redzone)

    def plan(self, problem: Problem, solution: Solution) -> Plan:
        """Return the plan that places the buffers of `problem` at the offsets of `solution`.

        Raises `InvalidPlan` if an op reads what nothing has written.
        """
        require_written_first(self.graph, self.schedule.order)
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return Plan(problem=problem, solution=solution, **own)


def make_plan(scheduled: ScheduledGraph, options: PlanOptions = DEFAULTS) -> Plan:
    """Return the plan of a scheduled graph: an offset in bytes for every planned storage.

    Of `options`, only those of the solver matter here. Raises `InvalidSolution` if the solver returns an invalid
    placement.
    """
    problem = scheduled.problem
    return scheduled.plan(problem, solved(problem, options))


def solved(
    problem: Problem, options: PlanOptions, *, capacity: int | None = None, work_limit: int | None = None
) -> Solution:
    """Return the solution of a problem by the solver, in the layout and within the time that `options` name.

    With a `capacity` (bytes), it is the first one within it that is found, and none that is smaller is looked for.
    `work_limit`: the most units of work of the solver; None for its default.
    """
    return solve(
        problem,
        solver=options.layout_solver,
        time_limit=options.time_limit,
        work_limit=work_limit,
        capacity=capacity,
    )
