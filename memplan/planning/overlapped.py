"""Lets the collectives of a plan run beside its ops, in the bytes of its arena that are free.

A plan is made with collectives that have their results when they return, which is what needs the fewest bytes. Then its
gathers start earlier, and its reductions are waited for later (`moved_collectives.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memplan.core.collectives import is_collective
from memplan.core.evictions import EvictionPlan
from memplan.core.graph import Graph
from memplan.core.graph_edit import in_order
from memplan.core.plan import Plan
from memplan.core.problem import Problem, Solution, Status
from memplan.core.schedule import Schedule, make_schedule
from memplan.evict.costs import CostModel, Link, simulate
from memplan.planning.fit import plan_again
from memplan.planning.make_plan import ScheduledGraph, solved
from memplan.planning.moved_collectives import UNLIMITED, StepOrder, bytes_alive, with_late_waits
from memplan.planning.options import PlanOptions
from memplan.solvers import solve

_AT_ONCE = 1e18  # bytes per second
_WORK = 100_000  # units for each placement: one that is hard to find gives way to one with fewer bytes alive


def with_overlap(base: ScheduledGraph, plan: Plan, options: PlanOptions, costs: CostModel) -> Plan:
    """Return a plan of the same step whose collectives run beside its ops, or the plan where none can.

    Its arena is not larger than that of `plan`, or than its budget allows. `base` is the step without evictions: with
    all that an unlimited arena allows, it takes the seconds that a budget is compared with.
    """
    most = UNLIMITED if options.in_flight_bytes is None else options.in_flight_bytes
    if not plan.collectives or not most:
        return plan
    limit = plan.arena_size
    if plan.arena_limit is not None and not plan.redzone:
        limit = max(limit, plan.arena_limit)
    whole = _Overlap(step=_step_of(base.graph, base.schedule, base.problem), like=base, costs=costs, most=most)
    base_seconds = min(simulate(one.graph, costs)[0] for one in whole.ways(UNLIMITED))
    kept, order = plan.eviction, plan.schedule.order
    step = _step_of(plan.graph, plan.schedule, plan.problem)
    if kept is not None:
        step = replace(step, sources=tuple(kept.sources[i] for i in order))
    like = replace(base, graph=plan.graph, schedule=plan.schedule)
    overlap = _Overlap(step=step, like=like, costs=costs, most=most)

    def make(live: int) -> Plan | int | None:
        """Return a plan, or the live bytes to try next; None if there is nothing to try."""
        over = []
        for found in sorted(overlap.ways(live), key=lambda one: round(simulate(one.graph, costs)[0], 9)):
            if len(found.graph.ops) == len(order):  # nothing runs beside ops
                break
            schedule = make_schedule(found.graph, tuple(range(len(found.graph.ops))), plan.schedule.policy)
            made = _placed(plan, step, found, schedule, plan.solution)
            if not _keeps_total(made, found.problem.max_live, plan):  # before it is placed, which may take long
                continue
            solution = solved(found.problem, options, capacity=limit, work_limit=_WORK)
            if solution.status in (Status.OPTIMAL, Status.FEASIBLE):
                made = replace(made, solution=solution)
                if _keeps_total(made, solution.arena_size, plan):
                    return _recorded(made, found.sources, costs, base_seconds)
                continue
            needed = max(solution.arena_size, found.problem.max_live)  # a placement may be missing
            over.append(min(live, found.problem.max_live) - (needed - limit))
        return max(over, default=None)

    def less(made: Plan | int | None, _: int) -> int | None:
        return made if isinstance(made, int) else None

    made, _ = plan_again(make, less, limit)
    if isinstance(made, Plan):
        return made
    return plan if kept is None else _recorded(plan, kept.sources, costs, base_seconds)


def with_hidden_collectives(graph: Graph, options: PlanOptions, costs: CostModel) -> PlanOptions:
    """Return options by whose costs collectives take no time, for a budget, and a link that is not busier than the ops.

    Evictions are chosen before anything overlaps, as if each gather that is repeated stopped the step. Most of them run
    beside ops then.
    """
    limits = options.budget, options.arena_budget
    if "min" in limits or limits == (None, None) or options.in_flight_bytes == 0:
        return options
    seconds = [(costs.op_seconds(graph, op), is_collective(op.target)) for op in graph.ops]
    if 2 * sum(took for took, collective in seconds if collective) > sum(took for took, _ in seconds):
        return options
    measured = {of: took for of, took in costs.measured.items() if not is_collective(of)}
    free = Link(bytes_per_second=_AT_ONCE, latency=0.0)
    return replace(options, costs=replace(costs, between_ranks=free, measured=measured))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """A step whose collectives can run beside its ops. `like` has its alignment; `most`: the bytes under way."""

    step: StepOrder
    like: ScheduledGraph
    costs: CostModel
    most: int

    def ways(self, live: int) -> Iterator[StepOrder]:
        """Yield the step with early gathers, and with late reductions too; at most about `live` bytes are alive."""
        early = self._measured(self.step.fastest(self.costs, live=live, in_flight=self.most))
        yield early
        alive = bytes_alive(early.problem, len(early.graph.ops))
        graph, sources = with_late_waits(
            early.graph, early.sources, self.costs, live=alive, limit=live, in_flight=self.most
        )
        if len(graph.ops) > len(early.graph.ops):
            yield self._measured(replace(early, graph=graph, sources=sources))

    def _measured(self, step: StepOrder) -> StepOrder:
        """Return a step whose order has changed with its buffers."""
        schedule = make_schedule(step.graph, tuple(range(len(step.graph.ops))), "overlapped")
        return replace(step, problem=replace(self.like, graph=step.graph, schedule=schedule).problem)


def _step_of(graph: Graph, schedule: Schedule, problem: Problem) -> StepOrder:
    return StepOrder(graph=in_order(graph, schedule.order), sources=schedule.order, problem=problem)


def _placed(plan: Plan, before: StepOrder, found: StepOrder, schedule: Schedule, solution: Solution) -> Plan:
    """Return the plan of a step in another order, with what was measured of its ops."""
    made = replace(plan, graph=found.graph, schedule=schedule, problem=found.problem, solution=solution)
    if plan.temporaries is None:
        return made
    beside = dict(zip(before.sources, (plan.temporaries[i] for i in plan.schedule.order), strict=True))
    return replace(made, temporaries=tuple(beside.get(source, 0) if source >= 0 else 0 for source in found.sources))


def _keeps_total(made: Plan, arena: int, before: Plan) -> bool:
    """Return whether a plan keeps the budget of the plan before in an arena, with what is allocated beside that."""
    budget = None if before.eviction is None else before.eviction.budget
    return budget is None or made.on_device - made.arena_size + arena <= max(budget, before.on_device)


def _recorded(plan: Plan, sources: tuple[int, ...], costs: CostModel, base_seconds: float) -> Plan:
    """Return the plan with a record of where its ops come from, and of the predicted seconds."""
    seconds, stall = simulate(in_order(plan.graph, plan.schedule.order), costs)
    kept = plan.eviction or EvictionPlan(
        policy="checkpoint",  # as torch does: nothing is evicted
        costs=costs.name,
        arena_budget=plan.arena_size,
        seconds=0.0,
        base_seconds=0.0,
        stall=0.0,
        sources=sources,
        instances=(),
        host=solve(Problem(buffers=())),
    )
    kept = replace(kept, sources=sources, seconds=seconds, stall=stall, base_seconds=min(base_seconds, seconds))
    if kept.policy == "checkpoint":
        kept = replace(kept, arena_budget=plan.arena_size)
    return replace(plan, eviction=kept)
