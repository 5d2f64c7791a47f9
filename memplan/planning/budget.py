"""Reads a budget in any notation and makes a plan that keeps it.

The arena must fit, not only the live bytes: if fragmentation makes it too large, more is evicted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from memplan.core import lifetimes
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule, make_schedule
from memplan.core.units import format_bytes, parse_share, parse_size
from memplan.errors import BudgetInfeasible, InvalidCosts, InvalidSize
from memplan.evict.costs import DEVICES, CostModel, load_costs
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.genoa import genoa
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy, Workload
from memplan.planning.fit import Fitted, fit, make_workload, smallest
from memplan.planning.make_plan import make_plan
from memplan.solvers import Solver, solve

Budget = int | float | str
_TRIES = 4
_HIGHEST = 2**63 - 1  # the largest number of compiled loops


def plan_within(
    budget: Budget | None,
    *,
    model: str,
    graph: Graph,
    schedule: Schedule,
    alignment: int,
    versions: Mapping[str, str],
    costs: CostModel | str,
    policy: str | Policy = "auto",
    redzone: int = 0,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
    room: int = 0,
    device: str = "",
) -> Plan:
    """Make a plan of a scheduled graph whose arena is at most `budget`.

    `budget` is a number of bytes, a text ("8GiB"), a share of the bytes needed without evictions (0.5, "50%"), or
    "min". It limits the arena, not the sum of live bytes: if fragmentation makes the arena too large, more is evicted.
    Red zones are not counted. `room` are the bytes of an arena that exists anyway, because several programs share it;
    all of them may be used. `device` is the device of a step whose model and inputs are on the host and are copied;
    then no budget (None) means the bytes with which nothing is copied twice, and for the policy "genoa" the smallest
    possible. `time_limit` is in seconds. Raises `BudgetInfeasible`, which names the op with the largest working set and
    the smallest budget that can be kept.
    """
    decide = fit_policy(policy)
    workload = make_workload(graph, schedule.order, cost_model(costs), alignment, device=device)
    if budget is None and decide is genoa:
        budget = "min"
    wanted = max(bytes_of(budget, workload, decide), room)
    asked = workload = workload.within(wanted)
    options: dict[str, Any] = {"redzone": redzone, "solver": solver, "time_limit": time_limit}
    place = partial(make_plan, model=model, alignment=alignment, versions=versions, **options)
    plan: Plan | None = None
    for _ in range(_TRIES):
        try:
            fitted = fit(graph, workload, decide)
        except BudgetInfeasible:
            if plan is None:
                raise
            break  # it names a smaller budget than the one that was asked for
        order = make_schedule(fitted.graph, tuple(range(len(fitted.graph.ops))), schedule.policy)
        plan = place(graph=fitted.graph, schedule=order)
        plan = replace(plan, eviction=eviction_of(fitted, plan, policy_name(policy), asked))
        over = plan.arena_size - wanted
        if over <= 0 or redzone:
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


def require_known(policy: str | Policy, costs: CostModel | str | None) -> None:
    """Raise the errors of `plan_within` for an unknown policy or cost model."""
    fit_policy(policy)
    if costs is not None:
        cost_model(costs)


def cost_model(costs: CostModel | str | os.PathLike[str]) -> CostModel:
    """Return the cost model of a known device (by name), of a `.json` file (by path), or `costs` itself if it is one.

    Raises `InvalidCosts` for anything else, and the errors of `load_costs`.
    """
    if isinstance(costs, CostModel):
        return costs
    if isinstance(costs, os.PathLike) or (isinstance(costs, str) and costs.endswith(".json")):
        return load_costs(costs)
    if not isinstance(costs, str) or costs.lower() not in DEVICES:
        hint = f"choose one of: {', '.join(DEVICES)}, or measure one: memplan.profile(model, inputs)"
        if costs == "measure":
            hint = f"memplan.compile and compile_step measure their first steps; here, {hint}"
        raise InvalidCosts(f"there is no cost model {costs!r}", where="costs", hint=hint)
    return DEVICES[costs.lower()]


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


def bytes_of(budget: Budget | None, workload: Workload, policy: Policy) -> int:
    """Return the bytes of a budget; None means the bytes needed without a budget. Raises `InvalidSize`."""
    hint = "give bytes (8589934592), a text ('8GiB'), a share of the need without a budget (0.5, '50%'), or 'min'"
    if budget is None and workload.host_resident:
        return measure(workload, workload.plain).peak
    if budget == "min":
        return smallest(workload, policy)
    if isinstance(budget, str):
        if not budget.strip().endswith("%"):
            nbytes = parse_size(budget)
            if not nbytes and budget.strip("0."):
                raise InvalidSize(f"{budget!r} is less than a byte", where="budget", hint=hint)
            return nbytes
        budget = parse_share(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise InvalidSize(f"{budget!r} is not a budget", where="budget", hint=hint)
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise InvalidSize(f"{budget!r} is not a share between 0 and 1", where="budget", hint=hint)
        return int(measure(workload, workload.plain).peak * budget)
    if budget < 0:
        raise InvalidSize(f"{budget!r} is negative", where="budget", hint=hint)
    return min(budget, _HIGHEST)
