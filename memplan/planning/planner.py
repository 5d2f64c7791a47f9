"""Makes plans of one scheduled graph that keep limits of bytes: more is evicted where a plan is too large.

The arena must fit, not only the live bytes: fragmentation, and what is outside the arena, may make a plan too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memplan.core import lifetimes
from memplan.core.collectives import is_collective
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.totals import MODEL_KINDS, known_transient, outside_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies import policy_name
from memplan.evict.policies.checkpoint import checkpoint, with_blocks
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.evict.workload import Policy, Workload, floor
from memplan.planning.base_graph import eager_total
from memplan.planning.fit import Fitted, fit, make_workload, plan_again, quick_of, smallest
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions, read_budget
from memplan.planning.outside_arena import plan_partly_outside
from memplan.schedule import proven, traced
from memplan.solvers import solve

_HIGHEST = 2**63 - 1  # the largest number of compiled loops


def budgets_in_bytes(
    options: PlanOptions,
    graph: Graph,
    workload: Workload,
    free: Callable[[], Plan] | None = None,
    *,
    whole: tuple[int, int] = (0, 0),
) -> PlanOptions:
    """Return the options with the budgets of the total and the arena as numbers of bytes; "min" and None stay.

    A share of `budget` is one of what eager needs for the traced `graph` (`eager_total`) and `options.reserve`; a share
    of `arena_budget` is one of the live bytes without a budget: of the plan that `free` makes, or of `workload`
    (`live_without_budget`). `whole`: the most bytes alive, in a plan and in eager, if the loss head of `graph` were not
    in blocks.
    """

    def total() -> int:
        return max(eager_total(graph), graph.bytes_of(*MODEL_KINDS) + whole[1]) + options.reserved

    def arena() -> int:
        return max(live_without_budget(workload), whole[0]) if free is None else free().max_live

    def resolved(budget: object, name: str, whole: Any) -> Any:
        if budget is None:
            return None
        if isinstance(budget, Sequence) and not isinstance(budget, str):
            return tuple(resolved(one, name, whole) for one in budget)
        read = read_budget(budget, name)
        if isinstance(read, float):
            return int(whole() * read)
        return read if isinstance(read, str) else min(read, _HIGHEST)

    return replace(
        options,
        budget=resolved(options.budget, "budget", total),
        arena_budget=resolved(options.arena_budget, "arena_budget", arena),
    )


def live_without_budget(workload: Workload) -> int:
    """Return the most live bytes of a step that follows the model's checkpoints, and else evicts nothing."""
    states = with_saved_states(workload)
    return measure(*only_used(states, checkpoint(states.workload))).peak


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLimits:
    """The limits of a plan on one device, in bytes; None is no limit.

    `host_budget` and `pinned_budget` limit the copies on the host, which are page-locked where `pinned`. `room` are
    the bytes of an arena that exists already: all of it may be used, and all of it counts in the total. `relative`: the
    total is a share of this step's own, which the existing arena may exceed.
    """

    total: int | None = None
    arena: int | None = None
    host_budget: int | None = None
    pinned_budget: int | None = None
    pinned: bool = False
    room: int = 0
    relative: bool = False

    @property
    def host(self) -> int | None:
        """The most bytes of copies on the host; None for no limit."""
        return _least(self.host_budget, self.pinned_budget if self.pinned else None)

    def arena_beside(self, outside: int) -> int:
        """Return the most bytes that the arena may have beside `outside` bytes that are on the device too.

        An arena that does not fit into the existing one is a second one.
        """
        if self.total is None:
            return max(_HIGHEST if self.arena is None else self.arena, self.room)
        fits = self.relative or self.room + outside <= self.total
        within = max(self.total - outside - self.room, self.room if fits else 0)
        return within if self.arena is None else min(within, max(self.arena, self.room))

    def total_of(self, plan: Plan) -> int:
        """Return the bytes on the device at the peak of `plan`, with the existing arena."""
        return plan.on_device + (self.room - plan.arena_size if plan.arena_size <= self.room else self.room)

    def over(self, plan: Plan) -> int:
        """Return by how many bytes the arena of `plan` is too large, at most 0 where it is not. Red zones count."""
        return plan.arena_size - self.arena_beside(plan.on_device - plan.arena_size)

    def keeps(self, plan: Plan) -> bool:
        """Return whether `plan` is within all limits. Red zones, which are for tests, are not counted."""
        if self.host is not None and plan.host_size > self.host:
            return False
        within = self.total is None or self.relative or self.total_of(plan) <= self.total
        return bool(plan.redzone) or (self.over(plan) <= 0 and within)


def device_of(graph: Graph, workload: Workload) -> str:
    """Return the device of a step's arena; "" where nothing is planned."""
    return workload.device or next((s.device for s in graph.storages if s.planned), "")


def is_pinned(device: str) -> bool:
    """Return whether copies that a step on `device` has on the host are page-locked."""
    return bool(device) and not device.startswith("cpu")


def _least(one: int | None, two: int | None) -> int | None:
    """Return the smaller of two limits; None is no limit."""
    if one is None or two is None:
        return two if one is None else one
    return min(one, two)


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
        return self._descend(self.live_limit, leave_out=False)

    @property
    def live_limit(self) -> int:
        """The most bytes that the arena may have, beside what ops are known to allocate outside."""
        transient = known_transient(self.scheduled.graph) if self.transient is None else self.transient
        return self._arena_beside(transient)

    def in_the_order_of_checkpoints(self) -> Planner:
        """Return the planner of the traced order if checkpoints need less there, as of a step that is run by hand.

        An order with the fewest live bytes where nothing is evicted may put all gradients of weights last, so that
        whatever they are computed from comes back and stays.
        """
        w, graph = self.workload, self.scheduled.graph
        by_hand = make_workload(graph, tuple(range(len(graph.ops))), w.costs, w.alignment)
        if live_without_budget(with_blocks(by_hand)) >= live_without_budget(with_blocks(w)):
            return self
        scheduled = replace(self.scheduled, schedule=traced(graph))
        return replace(self, scheduled=scheduled, workload=replace(by_hand, host_budget=w.host_budget))

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

        def make(nbytes: int) -> tuple[Plan, int] | None:
            """Return a plan with at most so many live bytes, and how many it has before results leave the arena."""
            if nbytes < lowest:
                return None
            try:
                plan = self._placed(fit(self.scheduled.graph, self.workload.within(nbytes), self.policy))
            except BudgetInfeasible:
                return None
            live = min(nbytes, plan.max_live)
            return (self.partly_outside(plan, self.limits.total or 0) if leave_out else None) or plan, live

        def less(made: tuple[Plan, int] | None, _: int) -> int | None:
            if made is None:
                return None
            plan, live = made
            over = self.limits.over(plan)
            if self.limits.keeps(plan):
                return None
            return live - over if over > 0 else -1  # what is too large is no part of the arena

        found, kept = plan_again(make, less, wanted)
        return None if found is None or not kept else self.recorded(found[0])

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
    order = proven(fitted.graph, scheduled.schedule.policy)
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
