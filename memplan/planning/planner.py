"""Makes plans of one scheduled graph that keep limits of bytes: more is evicted where a plan is too large.

The arena must fit, not only the live bytes: fragmentation, and what is outside the arena, may make a plan too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.core import lifetimes
from memplan.core.collectives import is_collective
from memplan.core.evictions import EvictionPlan
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.core.totals import functional_transient, outside_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.judge.arrays import measure
from memplan.evict.select import policy_name
from memplan.evict.workload import Policy, Workload
from memplan.evict.workload_limits import floor
from memplan.planning.byte_limits import ByteLimits
from memplan.planning.fit import Fitted, fit, quick_of, smallest
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import plan_partly_outside
from memplan.solvers import solve

_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
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

    def quick(self) -> Planner:
        """Return the same planner with a policy that takes less time."""
        return replace(self, policy=quick_of(self.policy))

    def within_host(self, nbytes: int | None) -> Planner:
        """Return the same planner with another limit of the bytes on the host; None for no limit."""
        limits = replace(self.limits, host_budget=nbytes, pinned_budget=None)
        return replace(self, limits=limits, workload=replace(self.workload, host_budget=nbytes))

    def descended(self) -> Plan | None:
        """Return a plan that keeps the limits, found by evicting more where one needs more; None if none is found."""
        graph = self.scheduled.graph
        transient = functional_transient(graph) if self.transient is None else self.transient
        return self._descend(self._arena_beside(transient), leave_out=False)

    def below_partly_outside(self) -> Plan | None:
        """Return a plan that keeps the limits because results that are dead when kernels need most are outside the
        arena; None if none is found."""
        if self.limits.total is None or not self.may_leave_out:
            return None
        return self._descend(self._arena_beside([0] * len(self.scheduled.graph.ops)), leave_out=True)

    def _arena_beside(self, transient: Sequence[int]) -> int:
        """Return the most bytes that the arena may have, where ops allocate `transient` bytes."""
        graph, order = self.scheduled.graph, self.scheduled.schedule.order
        outside = outside_bytes(graph, order, transient, away=bool(self.workload.device)) + self.scheduled.reserve
        return self.limits.arena_beside(outside)

    def _descend(self, wanted: int, *, leave_out: bool) -> Plan | None:
        """Return a plan that keeps the limits, the first of those with at most `wanted` live bytes, then fewer.

        `leave_out`: results may be outside the arena.
        """
        lowest, _ = floor(self.workload)
        for _ in range(_TRIES):
            if wanted < lowest:
                return None
            try:
                plan = self._placed(fit(self.scheduled.graph, self.workload.within(wanted), self.policy))
            except BudgetInfeasible:
                return None
            wanted = min(wanted, plan.max_live)
            if leave_out:
                plan = self.partly_outside(plan, self.limits.total or 0) or plan
            if self.limits.keeps(plan):
                return self.recorded(plan)
            over = self.limits.over(plan)
            if over <= 0:  # what is too large is no part of the arena
                return None
            wanted -= over
        return None

    def partly_outside(self, plan: Plan, limit: int) -> Plan | None:
        """Return a smaller plan of the same order, with results outside the arena; None if there is none."""
        if not self.may_leave_out:
            return None
        return plan_partly_outside(plan, limit, self.options)

    @property
    def may_leave_out(self) -> bool:
        """Whether results may be outside the arena: the total is limited, the arena is this step's own, and no
        collectives will run beside ops."""
        apart = self.workload.device or self.limits.room or self.scheduled.redzone
        divided = any(is_collective(op.target) for op in self.scheduled.graph.ops)
        return self.options.budget is not None and not apart and not divided

    def plain(self) -> Plan:
        """Return the plan that evicts nothing."""
        peak = measure(self.workload, self.workload.plain).peak
        return self._placed(fit(self.scheduled.graph, self.workload.within(peak), self.policy))

    def smallest(self) -> Plan:
        """Return the plan with the smallest arena for which the policy finds events; its arena is its arena budget."""
        nbytes = smallest(self.workload, self.policy)
        try:
            fitted = fit(self.scheduled.graph, self.workload.within(nbytes), self.policy)
        except BudgetInfeasible:
            fitted = fit(self.scheduled.graph, self.workload.within(nbytes), quick_of(self.policy))
        return self._placed(fitted)

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
