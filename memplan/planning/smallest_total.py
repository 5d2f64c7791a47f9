"""Finds the smallest total of a step: evictions and results outside the arena, chosen in turns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.errors import BudgetInfeasible
from memplan.planning.fit import make_workload
from memplan.planning.outside_arena import leaving_first
from memplan.planning.planner import Planner

_ROUNDS = 2  # of evictions after results have left the arena; further ones found less than they took


def smallest_total(planner: Planner) -> Plan:
    """Return the plan with the smallest total that is found, where results may be outside the arena.

    What one kernel reads and writes is the floor of an arena. Results that leave the arena lower the floor, and then
    more evictions may be worth their time: both are chosen in turns.
    """
    made = planner.smallest()
    best = planner.partly_outside(made, 0) or made
    for _ in range(_ROUNDS if planner.may_leave_out else 0):
        lower = _leaving_out(planner, made)
        if lower is None:
            break
        try:
            made = lower.smallest()
        except BudgetInfeasible:  # of the host
            break
        found = lower.partly_outside(made, 0) or made
        if found.on_device >= best.on_device or (planner.limits.keeps(best) and not planner.limits.keeps(found)):
            break
        planner, best = lower, found
    return best


def _leaving_out(planner: Planner, plan: Plan) -> Planner | None:
    """Return the planner of the same step with those results outside that keep the arena of `plan` large, if in the
    traced step they are alive in one phase alone; None if there are none."""
    graph, order = planner.scheduled.graph, planner.scheduled.schedule.order
    assert plan.eviction is not None
    known = {s.name: i for i, s in enumerate(graph.storages) if s.planned}
    phases, leaving = defaultdict[int, set[Phase]](set), set[int]()
    for one in graph.ops:
        for storage in graph.touched(one):
            phases[storage].add(one.phase)
    transient = None if planner.transient is None else list(planner.transient)
    for name, op, fresh in leaving_first(plan, planner.options):
        storage, source = known.get(name, -1), plan.eviction.sources[op]
        if len(phases[storage]) != 1:
            continue
        leaving.add(storage)
        if transient is not None:
            transient[source] = max(transient[source] - fresh, 0)
    if not leaving:
        return None
    lower = graph.with_outside(leaving)
    schedule = make_schedule(lower, order, planner.scheduled.schedule.policy)
    scheduled = replace(planner.scheduled, graph=lower, schedule=schedule)
    workload = make_workload(lower, order, planner.workload.costs, scheduled.alignment, device=planner.workload.device)
    workload = replace(workload, host_budget=planner.workload.host_budget)
    return replace(planner, scheduled=scheduled, workload=workload, transient=transient)
