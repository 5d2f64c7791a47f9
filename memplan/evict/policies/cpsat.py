"""`cpsat`: an exact policy for graphs of about a hundred ops, by OR-Tools and retention intervals; recompute only.

`auto` does not build on it. It is a documented choice of users (`policy="cpsat"`), and the reference that shows how far
the other policies are from the optimum on such graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplan.core.interruptible import run
from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.auto import recompute
from memplan.evict.policies.retention import TICKS, RetentionProgram
from memplan.evict.workload import Workload, with_host_resident_kept
from memplan.evict.workload_limits import floor, require_floor


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best events that were found, their seconds, and a lower bound on the seconds of all plans of this form."""

    events: Events
    seconds: float
    bound: float

    @property
    def proven(self) -> bool:
        """Whether no plan of this form is faster (up to the ticks that the solver counts)."""
        return self.seconds <= self.bound + len(self.events) / TICKS


def cpsat(workload: Workload, *, work: float = 5.0) -> Events:
    """Return the faster events of `optimum` and the greedy `recompute`; host-resident storages stay on the device.

    Raises `BudgetInfeasible` when neither keeps the budget.
    """
    return with_host_resident_kept(workload, lambda inner: _best(inner, work))


def _best(workload: Workload, work: float) -> Events:
    require_floor(workload)
    try:
        greedy: Events | None = recompute(workload)
    except BudgetInfeasible:
        greedy = None
    try:
        found = optimum(workload, work=work, hint=greedy)
    except BudgetInfeasible:
        if greedy is None:
            raise
        return greedy
    if greedy is not None and measure(workload, greedy).seconds <= found.seconds:
        return greedy
    return found.events


def optimum(workload: Workload, *, work: float = 5.0, lives: int = 2, hint: Events | None = None) -> Optimum:
    """Return the fastest events in which every storage has at most `lives` lives, or the best found within `work`.

    `work` is OR-Tools' deterministic time, `hint` are events to start from. `workload` must have no host-resident
    storages. Raises `BudgetInfeasible` when there are no such events, or none were found. Imports OR-Tools.
    """
    from ortools.sat.python import cp_model

    program = RetentionProgram(workload, lives)
    if hint is not None:
        program.hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    status = run(solver, program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        least, at = floor(workload)
        op = workload.graph.ops[at].name
        said = "proves that nothing fits" if status == cp_model.INFEASIBLE else "found nothing that fits in its time"
        raise BudgetInfeasible(
            f"CP-SAT {said}: {workload.budget} bytes, {lives} lives of a storage",
            op=op,
            smallest=least,
            hint=f"policy='auto' may swap too; no plan needs less than {least} bytes (op {op})",
        )
    events = program.events(solver)
    bound = sum(workload.seconds) + solver.best_objective_bound / TICKS
    return Optimum(events=events, seconds=measure(workload, events).seconds, bound=bound)
