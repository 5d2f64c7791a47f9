"""Says why no plan of a step keeps its limits: what op needs the most at once, and the smallest limit that works."""

from __future__ import annotations

from memplan.core.plan import Plan
from memplan.core.totals import page_locked
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.workload_limits import floor
from memplan.planning.planner import Planner


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
        f"the step cannot run in {format_bytes(limit)}: {needs}",
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
    smallest = page_locked(high) if pinned else high
    limit = format_bytes(limits.host or 0) + (", the power of two within that budget" if pinned else "")
    where = "pinned_budget" if pinned else "host_budget"
    most = max(planner.workload.graph.storages, key=lambda s: s.nbytes if s.planned else -1)
    return BudgetInfeasible(
        f"the step needs {format_bytes(high)} of copies on the host to keep its other budgets, its limit is"
        f" {limit}; the largest storage is {most.name}, {format_bytes(most.nbytes)}",
        op="",
        smallest=smallest,
        where=where,
        hint=f"give at least {smallest} bytes ({format_bytes(smallest)}), or a larger budget on the device",
    )


def _beside(plan: Plan) -> str:
    """Return what the device holds beside the arena, as a part of an error message; "" for nothing."""
    parts = [(size, name) for name, size in plan.outside.items() if size]
    if plan.eviction is not None and plan.eviction.device:
        parts = [(size, name) for size, name in parts if name in ("fallbacks", "temporaries", "reserve")]
    largest = ", ".join(f"{name} {format_bytes(size)}" for size, name in sorted(parts, reverse=True)[:4])
    return f"; beside the arena are {format_bytes(plan.on_device - plan.arena_size)} ({largest})" if parts else ""
