"""Makes a plan that keeps a budget.

The arena must fit, not only the live bytes: if fragmentation makes it too large, more is evicted.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.core import lifetimes
from memplan.core.evictions import EvictionPlan
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.policies.genoa import genoa
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy, Workload
from memplan.planning.fit import Fitted, fit, make_workload, smallest
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions, read_budget
from memplan.solvers import solve

_TRIES = 4
_HIGHEST = 2**63 - 1  # the largest number of compiled loops


def plan_within(
    scheduled: ScheduledGraph, options: PlanOptions, costs: CostModel, *, room: int = 0, device: str = ""
) -> Plan:
    """Return a plan of a scheduled graph whose arena is at most `options.budget`, by evictions of `options.policy`.

    The budget limits the arena, not the sum of live bytes: if fragmentation makes the arena too large, more is evicted.
    Red zones are not counted. `room` are the bytes of an arena that exists anyway, because several programs share it;
    all of them may be used. `device` is the device of a step whose model and inputs are on the host and are copied;
    then no budget (None) means the bytes with which nothing is copied twice and activation checkpoints are followed,
    and for the policy "genoa" the smallest possible. Raises `BudgetInfeasible`, which names the op with the largest
    working set and the smallest budget that can be kept.
    """
    decide = fit_policy(options.policy)
    workload = make_workload(scheduled.graph, scheduled.schedule.order, costs, scheduled.alignment, device=device)
    budget = "min" if options.budget is None and decide is genoa else options.budget
    wanted = max(bytes_of(budget, workload, decide), room)
    asked = workload = workload.within(wanted)
    plan: Plan | None = None
    for _ in range(_TRIES):
        try:
            fitted = fit(scheduled.graph, workload, decide)
        except BudgetInfeasible:
            if plan is None:
                raise
            break  # it names a smaller budget than the one that was asked for
        order = make_schedule(fitted.graph, tuple(range(len(fitted.graph.ops))), scheduled.schedule.policy)
        plan = make_plan(replace(scheduled, graph=fitted.graph, schedule=order), options)
        plan = replace(plan, eviction=eviction_of(fitted, plan, policy_name(options.policy), asked))
        over = plan.arena_size - wanted
        if over <= 0 or scheduled.redzone:
            return plan
        if budget in (None, "min"):  # more evictions cannot remove the fragmentation
            assert plan.eviction is not None
            return replace(plan, eviction=replace(plan.eviction, budget=plan.arena_size))
        workload = workload.within(max(workload.budget - over, 0))
    assert plan is not None
    raise BudgetInfeasible(
        f"its buffers need {format_bytes(plan.max_live)} and do not fit into {format_bytes(wanted)} without holes",
        op="",
        smallest=plan.arena_size,
        where="budget",
        hint=f"give at least {plan.arena_size} bytes, or the solver more time",
    )


def eviction_of(fitted: Fitted, plan: Plan, policy: str, asked: Workload) -> EvictionPlan:
    """Return the `EvictionPlan` of a step that keeps the budget of `asked`, with its host copies placed."""
    return EvictionPlan(
        policy=policy,
        costs=asked.costs.name,
        budget=asked.budget,
        seconds=fitted.measured.seconds,
        base_seconds=fitted.base.seconds,
        stall=fitted.measured.stall,
        sources=fitted.sources,
        instances=fitted.instances,
        host=solve(lifetimes.host_problem(fitted.graph, plan.schedule, alignment=plan.alignment)),
        device=asked.device,
    )


def bytes_of(budget: object, workload: Workload, policy: Policy) -> int:
    """Return the bytes of a budget; None means the bytes needed without a budget. Raises `InvalidSize`."""
    if budget is None and workload.host_resident:
        states = with_saved_states(workload)
        return measure(*only_used(states, checkpoint(states.workload))).peak  # without checkpoints: of the plain step
    read = read_budget(budget)
    if isinstance(read, str):
        return smallest(workload, policy)
    if isinstance(read, float):
        return int(measure(workload, workload.plain).peak * read)
    return min(read, _HIGHEST)
