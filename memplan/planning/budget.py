"""A budget as people give it, and the plan that keeps it: evict, place, and evict a little more if places are lost."""

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
_HIGHEST = 2**63 - 1  # what compiled loops count with


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
    """A plan of a scheduled graph whose arena is at most `budget`.

    `budget` is in bytes, a text ("8GiB"), a share of what the step needs without evictions (0.5, "50%"), or "min".
    The arena counts, not the sum of live bytes: where places are lost, more is evicted. Red zones come on top.
    `room`: bytes that are there anyway, an arena in which programs take turns; all of them may be used.
    `device`: where the step runs when the model and the caller are on the host, and everything of theirs is copied;
    then no budget (None) is what it takes to copy nothing twice, and for the policy "genoa" its floor.
    Raises `BudgetInfeasible`, naming the op that needs the most at once and the smallest budget that can be kept.
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
        if budget in (None, "min"):  # what is lost to places cannot be won back by evicting more
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
    """Raise what `plan_within` would for a policy or costs that are not known."""
    fit_policy(policy)
    if costs is not None:
        cost_model(costs)


def cost_model(costs: CostModel | str | os.PathLike[str]) -> CostModel:
    """A cost model by the name of a device (`memplan.evict.costs.DEVICES`), from a file (.json), or as it is.

    Raises `InvalidCosts` for what is none of these, and what `load_costs` does.
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
    """How the plan of a fitted step keeps the budget that was asked for, with its host copies placed too."""
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
    """What people write, in bytes; None is what the step needs without a budget. Raises `InvalidSize`."""
    hint = "give bytes (8589934592), a text ('8GiB'), a share of the need without a budget (0.5, '50%'), or 'min'"
    if budget is None and workload.streamed:
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
        raise InvalidSize(f"{budget!r} is no budget", where="budget", hint=hint)
    if isinstance(budget, float):
        if not 0 < budget <= 1:
            raise InvalidSize(f"{budget!r} is no share between 0 and 1", where="budget", hint=hint)
        return int(measure(workload, workload.plain).peak * budget)
    if budget < 0:
        raise InvalidSize(f"{budget!r} is negative", where="budget", hint=hint)
    return min(budget, _HIGHEST)
