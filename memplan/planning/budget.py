"""Makes a plan that keeps its budgets: that of the total, of the arena, and of the copies on the host.

The arena must fit, not only the live bytes: if fragmentation, or what is outside the arena, makes the plan too large,
more is evicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.core import lifetimes
from memplan.core.collectives import is_collective
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.core.totals import functional_transient, outside_bytes, page_locked
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.policies.genoa import genoa
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy, Workload
from memplan.evict.workload_limits import floor
from memplan.planning.byte_limits import ByteLimits, budgets_in_bytes, device_of, is_pinned
from memplan.planning.fit import Fitted, fit, make_workload, quick_of, smallest
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions, read_budget, read_size
from memplan.planning.outside_arena import leaving_first, plan_partly_outside
from memplan.solvers import solve

_TRIES = 4
_ROUNDS = 2  # of evictions after results have left the arena; further ones found less than they took


def plan_within(
    scheduled: ScheduledGraph,
    options: PlanOptions,
    costs: CostModel,
    *,
    room: int = 0,
    device: str = "",
    transient: Sequence[int] | None = None,
) -> Plan:
    """Return a plan of a scheduled graph that keeps the budgets of `options`, by evictions of `options.policy`.

    `options.budget` limits the total (`Plan.on_device`), `options.arena_budget` the arena; fragmentation counts. Red
    zones do not. `room` are the bytes of an arena that exists anyway, because several programs share it; all of them
    may be used. `device` is the device of a step whose model and inputs are on the host and are copied; then no budget
    (None) means the bytes with which nothing is copied twice and activation checkpoints are followed, and for the
    policy "genoa" the smallest possible. `transient` are the measured bytes that each op of the graph, and each op that
    computes it again, allocates outside the arena; None: only fresh results are known. Raises `BudgetInfeasible`, which
    names the op with the largest working set and the smallest budget that can be kept.
    """
    decide = fit_policy(options.policy)
    workload = make_workload(scheduled.graph, scheduled.schedule.order, costs, scheduled.alignment, device=device)
    unlimited = options.budget is None and options.arena_budget is None
    minimal = "min" in (options.budget, options.arena_budget) or (unlimited and decide is genoa)
    limits, workload = _limits(scheduled, options, workload, room)
    planner = _Planner(
        scheduled=scheduled, options=options, workload=workload, policy=decide, limits=limits, transient=transient
    )
    found = None if minimal else planner.below() or planner.below_partly_outside()
    if found is not None:
        return found
    least = planner.smallest_in_all()
    if not limits.keeps(least):
        raise planner.infeasible(least)
    return planner.recorded(least, minimal=minimal)


def eviction_of(fitted: Fitted, plan: Plan, policy: str, asked: Workload) -> EvictionPlan:
    """Return the `EvictionPlan` of a step whose arena keeps the budget of `asked`, with its host copies placed."""
    return EvictionPlan(
        policy=policy,
        costs=asked.costs.name,
        arena_budget=asked.budget,
        seconds=fitted.measured.seconds,
        base_seconds=fitted.base.seconds,
        stall=fitted.measured.stall,
        sources=fitted.sources,
        instances=fitted.instances,
        host=solve(lifetimes.host_problem(fitted.graph, plan.schedule, alignment=plan.alignment)),
        device=asked.device,
    )


def _limits(
    scheduled: ScheduledGraph, options: PlanOptions, workload: Workload, room: int
) -> tuple[ByteLimits, Workload]:
    """Return the limits that `options` ask for, and the workload with its limit of bytes on the host."""
    asked = budgets_in_bytes(options, scheduled.graph, workload)
    arena = asked.arena_budget
    if options.budget is None and arena is None and workload.host_resident:
        states = with_saved_states(workload)
        arena = measure(*only_used(states, checkpoint(states.workload))).peak  # without checkpoints: of the plain step
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Makes plans of one scheduled graph under different limits of its live bytes; `transient` is by traced op."""

    scheduled: ScheduledGraph
    options: PlanOptions
    workload: Workload
    policy: Policy
    limits: ByteLimits
    transient: Sequence[int] | None

    def below(self) -> Plan | None:
        """Return a plan that keeps the limits; None if none is found.

        Raises `InvalidEviction` for a policy whose events are invalid.
        """
        ways = [self]
        if self.limits.host is not None:  # the limit of the host changes the way of a search, and may mislead it
            ways += [replace(self, workload=replace(self.workload, host_budget=None)), self.quick()]
        return next((plan for way in ways if (plan := way.descended()) is not None), None)

    def quick(self) -> _Planner:
        """Return the same planner with a policy that takes less time."""
        return replace(self, policy=quick_of(self.policy))

    def within_host(self, nbytes: int | None) -> _Planner:
        """Return the same planner with another limit of the bytes on the host; None for no limit."""
        limits = replace(self.limits, host_budget=nbytes, pinned_budget=None)
        return replace(self, limits=limits, workload=replace(self.workload, host_budget=nbytes))

    def descended(self) -> Plan | None:
        """Return a plan that keeps the limits, found by evicting more where one needs more; None if none is found."""
        scheduled, workload = self.scheduled, self.workload
        transient = functional_transient(scheduled.graph) if self.transient is None else self.transient
        away = bool(workload.device)
        outside = outside_bytes(scheduled.graph, scheduled.schedule.order, transient, away=away) + scheduled.reserve
        wanted = self.limits.arena_beside(outside)
        lowest, _ = floor(workload)
        for _ in range(_TRIES):
            if wanted < lowest:
                return None
            try:
                plan = self._placed(fit(scheduled.graph, workload.within(wanted), self.policy))
            except BudgetInfeasible:
                return None
            if self.limits.keeps(plan):
                return self.recorded(plan)
            over = self.limits.over(plan)
            if over <= 0:  # what is too large is no part of the arena
                return None
            wanted = min(wanted, plan.max_live) - over
        return None

    def below_partly_outside(self) -> Plan | None:
        """Return a plan that keeps the limits because results that are dead when kernels need most are outside the
        arena; None if none is found."""
        if self.limits.total is None or not self._may_leave_out:
            return None
        graph, order = self.scheduled.graph, self.scheduled.schedule.order
        kept = outside_bytes(graph, order, [0] * len(graph.ops)) + self.scheduled.reserve
        wanted, (lowest, _) = self.limits.arena_beside(kept), floor(self.workload)
        for _ in range(_TRIES):
            if wanted < lowest:
                return None
            try:
                plan = self._placed(fit(graph, self.workload.within(wanted), self.policy))
            except BudgetInfeasible:
                return None
            wanted = plan.max_live
            plan = self.partly_outside(plan, self.limits.total) or plan
            if self.limits.keeps(plan):
                return self.recorded(plan)
            over = self.limits.total_of(plan) - self.limits.total
            if over <= 0:
                return None
            wanted -= over
        return None

    def partly_outside(self, plan: Plan, limit: int) -> Plan | None:
        """Return a smaller plan of the same order, with results outside the arena; None if there is none."""
        if not self._may_leave_out:
            return None
        return plan_partly_outside(plan, limit, self.options)

    @property
    def _may_leave_out(self) -> bool:
        """Whether results may be outside the arena: the total is limited, the arena is this step's own, and no
        collectives will run beside ops."""
        apart = self.workload.device or self.limits.room or self.scheduled.redzone
        divided = any(is_collective(op.target) for op in self.scheduled.graph.ops)
        return self.options.budget is not None and not apart and not divided

    def smallest(self) -> Plan:
        """Return the plan with the smallest arena for which the policy finds events; its arena is its arena budget."""
        nbytes = smallest(self.workload, self.policy)
        try:
            fitted = fit(self.scheduled.graph, self.workload.within(nbytes), self.policy)
        except BudgetInfeasible:
            fitted = fit(self.scheduled.graph, self.workload.within(nbytes), quick_of(self.policy))
        return self._placed(fitted)

    def smallest_in_all(self) -> Plan:
        """Return the plan with the smallest total that is found, where results may be outside the arena.

        What one kernel reads and writes is the floor of an arena. Results that leave the arena lower the floor, and
        then more evictions may be worth their time: both are chosen in turns.
        """
        made = self.smallest()
        best = self.partly_outside(made, 0) or made
        planner = self
        for _ in range(_ROUNDS if self._may_leave_out else 0):
            lower = planner.leaving_out(made)
            if lower is None:
                break
            try:
                made = lower.smallest()
            except BudgetInfeasible:  # of the host
                break
            found = lower.partly_outside(made, 0) or made
            if found.on_device >= best.on_device or (self.limits.keeps(best) and not self.limits.keeps(found)):
                break
            planner, best = lower, found
        return best

    def leaving_out(self, plan: Plan) -> _Planner | None:
        """Return the planner of the same step with those results outside that keep the arena of `plan` large, if in the
        traced step they are alive in one phase alone; None if there are none."""
        graph, order = self.scheduled.graph, self.scheduled.schedule.order
        assert plan.eviction is not None
        known = {s.name: i for i, s in enumerate(graph.storages) if s.planned}
        phases, leaving = defaultdict[int, set[Phase]](set), set[int]()
        for one in graph.ops:
            for storage in graph.touched(one):
                phases[storage].add(one.phase)
        transient = None if self.transient is None else list(self.transient)
        for name, op, fresh in leaving_first(plan, self.options):
            storage, source = known.get(name, -1), plan.eviction.sources[op]
            if len(phases[storage]) != 1:
                continue
            leaving.add(storage)
            if transient is not None:
                transient[source] = max(transient[source] - fresh, 0)
        if not leaving:
            return None
        lower = graph.with_outside(leaving)
        schedule = make_schedule(lower, order, self.scheduled.schedule.policy)
        scheduled = replace(self.scheduled, graph=lower, schedule=schedule)
        workload = make_workload(lower, order, self.workload.costs, scheduled.alignment, device=self.workload.device)
        workload = replace(workload, host_budget=self.workload.host_budget)
        return replace(self, scheduled=scheduled, workload=workload, transient=transient)

    def recorded(self, plan: Plan, *, minimal: bool = False) -> Plan:
        """Return the plan with the budgets that it keeps. `minimal`: they are what the plan needs."""
        assert plan.eviction is not None
        limits = self.limits
        total = limits.total
        if self.options.budget == "min":
            total = plan.on_device
        elif total is not None:
            total = max(total, limits.total_of(plan)) if limits.relative else total
        whole = minimal or (limits.total is None and limits.arena is None)
        arena = plan.arena_size if whole else limits.arena_beside(plan.on_device - plan.arena_size)
        return replace(
            plan,
            eviction=replace(
                plan.eviction,
                budget=total,
                arena_budget=arena,
                host_budget=limits.host_budget,
                pinned_budget=limits.pinned_budget,
            ),
        )

    def infeasible(self, least: Plan) -> BudgetInfeasible:
        """Return the error of limits that no plan keeps; `least` is the smallest plan that was found."""
        limits = self.limits
        if limits.host is not None and (free := self.within_host(None).below()) is not None:
            return self._host_infeasible(free.host_size)
        needs, op = "no op runs in it", ""
        if self.workload.graph.ops:
            lowest, index = floor(self.workload)
            most = self.workload.graph.ops[index]
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

    def _host_infeasible(self, high: int) -> BudgetInfeasible:
        """Return the error of a limit of bytes on the host; with `high` bytes there, the other limits are kept."""
        limits, low = self.limits, self.limits.host
        assert low is not None
        while high - low > max(high // 100, self.workload.alignment):
            tried = (low + high) // 2
            plan = self.within_host(tried).quick().descended()
            low, high = (tried, high) if plan is None else (low, plan.host_size)
        pinned = limits.pinned and limits.host != limits.host_budget
        smallest = page_locked(high) if pinned else high
        limit = format_bytes(limits.host or 0) + (", the power of two within that budget" if pinned else "")
        where = "pinned_budget" if pinned else "host_budget"
        most = max(self.workload.graph.storages, key=lambda s: s.nbytes if s.planned else -1)
        return BudgetInfeasible(
            f"the step needs {format_bytes(high)} of copies on the host to keep its other budgets, its limit is"
            f" {limit}; the largest storage is {most.name}, {format_bytes(most.nbytes)}",
            op="",
            smallest=smallest,
            where=where,
            hint=f"give at least {smallest} bytes ({format_bytes(smallest)}), or a larger budget on the device",
        )

    def _placed(self, fitted: Fitted) -> Plan:
        """Return the plan of a step with evictions: its offsets, and its transient bytes where they were measured."""
        plan = placed(self.scheduled, self.options, fitted, policy_name(self.options.policy), self.workload)
        if self.transient is None:
            return plan
        return replace(plan, temporaries=tuple(0 if s < 0 else self.transient[s] for s in fitted.sources))


def placed(scheduled: ScheduledGraph, options: PlanOptions, fitted: Fitted, policy: str, workload: Workload) -> Plan:
    """Return the plan of a step with evictions, made of `scheduled` by the policy of that name: with its offsets."""
    order = make_schedule(fitted.graph, tuple(range(len(fitted.graph.ops))), scheduled.schedule.policy)
    plan = make_plan(replace(scheduled, graph=fitted.graph, schedule=order), options)
    return replace(plan, eviction=eviction_of(fitted, plan, policy, workload.within(plan.arena_size)))


def _beside(plan: Plan) -> str:
    """Return what the device holds beside the arena, as a part of an error message; "" for nothing."""
    parts = [(size, name) for name, size in plan.outside.items() if size]
    if plan.eviction is not None and plan.eviction.device:
        parts = [(size, name) for size, name in parts if name in ("fallbacks", "temporaries", "reserve")]
    largest = ", ".join(f"{name} {format_bytes(size)}" for size, name in sorted(parts, reverse=True)[:4])
    return f"; beside the arena are {format_bytes(plan.on_device - plan.arena_size)} ({largest})" if parts else ""
