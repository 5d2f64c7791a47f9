"""Makes a plan that keeps its budgets: that of the total, of the arena, and of the copies on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel
from memplan.evict.measure import measure
from memplan.evict.policies import fit_policy
from memplan.evict.policies.flow import genoa
from memplan.evict.workload import Workload, floor
from memplan.planning.fit import make_workload
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import PlanOptions, read_budget, read_size
from memplan.planning.planner import ByteLimits, Planner, budgets_in_bytes, device_of, is_pinned, live_without_budget


def infeasible(planner: Planner, least: Plan) -> BudgetInfeasible:
    """Return the error of limits that no plan keeps; `least` is the smallest plan that was found."""
    limits = planner.limits
    if limits.host is not None and (free := planner.within_host(None).below()) is not None:
        return _host_infeasible(planner, free.host_size)
    needs, op = "no op runs in it", ""
    if planner.workload.graph.ops:
        lowest, index = floor(planner.workload)
        most = planner.workload.graph.ops[index]
        module = f" in {most.origin.module}" if most.origin.module else ""
        needs, op = f"{most.name} ({most.target}){module} reads and writes {format_bytes(lowest)}", most.name
    need, where, limit = least.arena_size, "arena_budget", limits.arena
    if limits.total is not None and limits.total_of(least) > limits.total:
        need, where, limit = limits.total_of(least), "budget", limits.total
        needs += _beside(least)
    assert limit is not None
    return BudgetInfeasible(
        f"needs at least {format_bytes(need)}: the step cannot run in {format_bytes(limit)}; {needs}",
        op=op,
        smallest=need,
        where=where,
        hint=f"give at least {need} bytes ({format_bytes(need)}), or {where}='min'",
    )


def _host_infeasible(planner: Planner, high: int) -> BudgetInfeasible:
    """Return the error of a limit of bytes on the host; with `high` bytes there, the other limits are kept."""
    limits, low = planner.limits, planner.limits.host
    assert low is not None
    while high - low > max(high // 100, planner.workload.alignment):
        tried = (low + high) // 2
        plan = planner.within_host(tried).quick().descended()
        low, high = (tried, high) if plan is None else (low, plan.host_size)
    pinned = limits.pinned and limits.host != limits.host_budget
    where = "pinned_budget" if pinned else "host_budget"
    most = max(planner.workload.graph.storages, key=lambda s: s.nbytes if s.planned else -1)
    return BudgetInfeasible(
        f"the step needs {format_bytes(high)} of copies on the host to keep its other budgets, its limit is"
        f" {format_bytes(limits.host or 0)}; the largest storage is {most.name}, {format_bytes(most.nbytes)}",
        op="",
        smallest=high,
        where=where,
        hint=f"give at least {high} bytes ({format_bytes(high)}), or a larger budget on the device",
    )


def _beside(plan: Plan) -> str:
    """Return what the device holds beside the arena, as a part of an error message; "" for nothing."""
    parts = [(size, name) for name, size in plan.outside.items() if size]
    if plan.eviction is not None and plan.eviction.device:
        parts = [(size, name) for size, name in parts if name in ("fallbacks", "temporaries", "reserve")]
    largest = ", ".join(f"{name} {format_bytes(size)}" for size, name in sorted(parts, reverse=True)[:4])
    return f"; beside the arena are {format_bytes(plan.on_device - plan.arena_size)} ({largest})" if parts else ""


def plan_within(
    scheduled: ScheduledGraph,
    options: PlanOptions,
    costs: CostModel,
    *,
    room: int = 0,
    device: str = "",
    transient: Sequence[int] | None = None,
    free: Callable[[], Plan] | None = None,
) -> Plan:
    """Return a plan of a scheduled graph that keeps the budgets of `options`, by evictions of `options.policy`.

    `options.budget` limits the total (`Plan.on_device`), `options.arena_budget` the arena; fragmentation counts. Red
    zones do not. `room` are the bytes of an arena that exists anyway, because several programs share it; all of them
    may be used. `device` is the device of a step whose model and inputs are on the host and are copied; then no budget
    (None) means the bytes with which nothing is copied twice and activation checkpoints are followed, and for the
    policy "genoa" the smallest possible. `transient` are the measured bytes that each op of the graph, and each op that
    computes it again, allocates outside the arena; None: only fresh results are known. `free` makes the plan without a
    budget on the device; None: it evicts nothing. No share and no "min" needs more than that plan, and where the policy
    finds none, that one may keep the budget. Raises `BudgetInfeasible`, which names the op with the largest working set
    and the smallest budget that can be kept.
    """
    decide = fit_policy(options.policy)
    workload = make_workload(scheduled.graph, scheduled.schedule.order, costs, scheduled.alignment, device=device)
    unlimited = options.budget is None and options.arena_budget is None
    minimal = "min" in (options.budget, options.arena_budget) or (unlimited and decide is genoa)
    free = free and cache(free)
    limits, workload = _limits(scheduled, options, workload, room, free)
    planner = Planner(
        scheduled=scheduled, options=options, workload=workload, policy=decide, limits=limits, transient=transient
    )
    if unlimited and free is not None:
        return planner.recorded(free())
    ours_to_order = options.schedule == "auto" and not workload.host_resident
    if ours_to_order and (minimal or measure(workload, workload.plain).peak > planner.live_limit):
        planner = planner.in_the_order_of_checkpoints()
    relative = any(isinstance(read_budget(b), float) for b in (options.budget, options.arena_budget) if b is not None)
    found = None if minimal else planner.below() or planner.below_partly_outside()
    if found is not None and not (relative and free):
        return found
    if found is None:
        made = planner.smallest()
        found = planner.partly_outside(made, 0) or made
    candidates = [found]
    if free is not None:
        candidates.append(free())
    elif minimal and not workload.host_resident:
        candidates.append(planner.plain())
    by_arena = options.budget is None or (options.arena_budget == "min" and options.budget != "min")
    least = min(candidates, key=lambda p: (not limits.keeps(p), p.arena_size if by_arena else p.on_device))
    if not limits.keeps(least):
        raise infeasible(planner, least)
    return planner.recorded(least, minimal=minimal)


def _limits(
    scheduled: ScheduledGraph, options: PlanOptions, workload: Workload, room: int, free: Callable[[], Plan] | None
) -> tuple[ByteLimits, Workload]:
    """Return the limits that `options` ask for, and the workload with its limit of bytes on the host."""
    asked = budgets_in_bytes(options, scheduled.graph, workload, free)
    arena = asked.arena_budget
    if options.budget is None and arena is None and workload.host_resident:
        arena = live_without_budget(workload)
    limits = ByteLimits(
        total=asked.budget if isinstance(asked.budget, int) else None,
        arena=arena if isinstance(arena, int) else None,
        host_budget=read_size("host_budget", options.host_budget) if options.host_budget is not None else None,
        pinned_budget=read_size("pinned_budget", options.pinned_budget) if options.pinned_budget is not None else None,
        pinned=is_pinned(device_of(scheduled.graph, workload)),
        room=room,
        relative=isinstance(asked.budget, int) and not isinstance(read_budget(options.budget), int),
    )
    return limits, replace(workload, host_budget=limits.host)
