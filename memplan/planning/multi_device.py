"""Makes a plan for several devices: the step of one device, partitioned by blocks, with an arena placed on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.core import lifetimes
from memplan.core.evictions import DeviceArena, EvictionPlan
from memplan.core.plan import Plan
from memplan.core.problem import Problem, Solution, Status
from memplan.core.schedule import make_schedule
from memplan.core.totals import functional_transient, transient_on
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import CostModel, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.planning.blocks import Assignment, Units, assign, units_of
from memplan.planning.divide import Divided, devices_of, divide
from memplan.planning.fit import make_workload, plan_again
from memplan.planning.make_plan import ScheduledGraph, solved
from memplan.planning.options import PlanOptions
from memplan.planning.planner import budgets_in_bytes
from memplan.solvers import solve

_POLICY = "blocks"  # the name of the policy in plans

# A divided graph, its order, buffers in all and by device, solutions, transient bytes, bytes beside the arenas, limits.
_Made = tuple[
    Divided, ScheduledGraph, Problem, list[Problem], list[Solution], tuple[int, ...], list[int], Sequence[int]
]


def plan_several(
    scheduled: ScheduledGraph,
    options: PlanOptions,
    costs: CostModel,
    *,
    devices: tuple[str, ...],
    transient: Sequence[int] | None = None,
) -> Plan:
    """Return a plan of a scheduled graph whose blocks are partitioned over `devices`, each with an arena of its own.

    `options.budget` limits what each device holds in all, `options.arena_budget` the arena of each: a number of bytes,
    a text or a share that holds for each device, or a sequence with one such budget per device; None balances the
    devices. A share of `budget` is one of the predicted eager total, one of `arena_budget` is one of what one device
    would hold. Parameters stay on the device of their block from their first use to their last; nothing is evicted. The
    solver's time limit is for each device. `transient`: as in `plan_within`. Raises `BudgetInfeasible` with the
    smallest budget, the same for every device, that the partition can keep.
    """
    if options.policy != "auto":
        what = "several devices share a step by blocks, and evict nothing"
        raise MemplanError(what, where=f"policy={options.policy!r}", hint="leave out policy=, or name one device")
    graph, alignment = scheduled.graph, scheduled.alignment
    workload = make_workload(graph, scheduled.schedule.order, costs, alignment, device=devices[0])
    workload = workload.within(measure(workload, workload.plain).peak)
    asked = budgets_in_bytes(options, graph, workload)
    totals = _budgets(asked.budget, "budget", len(devices))
    arenas = _budgets(asked.arena_budget, "arena_budget", len(devices))
    reserves = [scheduled.reserve] * len(devices)
    budgets = None if totals is None and arenas is None else _stricter(arenas, totals, reserves)
    whole = apply(workload, flow(workload))
    units = units_of(whole.graph, len(devices))

    def make(wanted: list[int] | None) -> _Made:
        """Return the step divided into arenas of so many bytes, without holes."""
        try:
            assignment = assign(
                whole.graph, units, costs.to_device, alignment=alignment, count=len(devices), budgets=wanted
            )
        except BudgetInfeasible as error:
            if totals is None:
                error.where = "arena_budget"
                raise
            extra = max(functional_transient(graph) if transient is None else transient, default=0) + scheduled.reserve
            raise _with_more(error, extra) from error
        divided = _divided(whole, units, assignment, devices)
        require_equivalent(graph, divided.graph, divided.sources)
        order = make_schedule(divided.graph, tuple(range(len(divided.graph.ops))), scheduled.schedule.policy)
        partitioned = replace(scheduled, graph=divided.graph, schedule=order)
        problem = partitioned.problem
        parts = [lifetimes.device_problem(problem, divided.graph, device) for device in devices]
        solutions = [solved(part, options) for part in parts]
        known = functional_transient(divided.graph) if transient is None else _of_sources(transient, divided.sources)
        beside = [transient_on(divided.graph, known, device) + scheduled.reserve for device in devices]
        sizes = [solution.arena_size for solution in solutions]
        limits = sizes if budgets is None or scheduled.redzone else _stricter(arenas, totals, beside)
        return divided, partitioned, problem, parts, solutions, known, beside, limits

    def less(made: _Made, wanted: list[int] | None) -> list[int] | None:
        solutions, limits = made[4], made[7]
        over = [max(s.arena_size - b, 0) for s, b in zip(solutions, limits, strict=True)]
        return [max(b - extra, 0) for b, extra in zip(wanted or limits, over, strict=True)] if any(over) else None

    made, kept = plan_again(make, less, budgets)
    divided, partitioned, problem, parts, solutions, known, beside, limits = made
    if not kept:
        raise _without_holes(solutions, limits, beside if totals is not None else None)
    sections = _sections(devices, parts, solutions, limits, totals)
    plan = partitioned.plan(problem, _side_by_side(sections, solutions))
    plan = plan if transient is None else replace(plan, temporaries=known)
    return replace(plan, eviction=_eviction(plan, whole, divided, costs, sections))


def _eviction(
    plan: Plan, whole: Applied, divided: Divided, prices: CostModel, sections: tuple[DeviceArena, ...]
) -> EvictionPlan:
    """Return the `EvictionPlan` that records the devices' arenas and the predicted seconds of the step."""
    seconds, stall = simulate(divided.graph, prices)
    return EvictionPlan(
        policy=_POLICY,
        costs=prices.name,
        arena_budget=sum(section.arena_budget for section in sections),
        seconds=seconds,
        base_seconds=simulate(whole.graph, prices)[0],
        stall=stall,
        sources=divided.sources,
        instances=whole.instances,
        host=solve(lifetimes.host_problem(divided.graph, plan.schedule, alignment=plan.alignment)),
        device=", ".join(section.device for section in sections),
        sections=sections,
    )


def _sections(
    devices: Sequence[str],
    parts: Sequence[Problem],
    solutions: Sequence[Solution],
    limits: Sequence[int],
    totals: Sequence[int] | None,
) -> tuple[DeviceArena, ...]:
    """Return the arenas of the devices, at consecutive offsets."""
    found, start = [], 0
    for i, (device, part, solution) in enumerate(zip(devices, parts, solutions, strict=True)):
        size = solution.arena_size
        found.append(
            DeviceArena(
                device=device,
                start=start,
                size=size,
                max_live=part.max_live,
                arena_budget=limits[i],
                budget=None if totals is None else totals[i],
            )
        )
        start += size
    return tuple(found)


def _divided(whole: Applied, units: Units, assignment: Assignment, devices: Sequence[str]) -> Divided:
    wanted = [assignment.device_of(unit) if unit >= 0 else -1 for unit in units.of]
    return divide(whole.graph, whole.sources, devices_of(whole.graph, wanted), devices)


def _side_by_side(sections: Sequence[DeviceArena], solutions: Sequence[Solution]) -> Solution:
    """Return the solutions of all devices as one solution, with the arenas at consecutive offsets."""
    offsets = {
        name: offset + section.start
        for section, solution in zip(sections, solutions, strict=True)
        for name, offset in solution.offsets.items()
    }
    optimal = all(solution.status is Status.OPTIMAL for solution in solutions)
    return Solution(
        offsets=offsets,
        arena_size=sum(solution.arena_size for solution in solutions),
        status=Status.OPTIMAL if optimal else Status.FEASIBLE,
        bound=sum(solution.bound for solution in solutions),
        solver=", ".join(dict.fromkeys(solution.solver for solution in solutions)),
        seconds=sum(solution.seconds for solution in solutions),
    )


def _budgets(budget: object, name: str, count: int) -> list[int] | None:
    """Return the budget in bytes of each of `count` devices; None for none. Raises `InvalidSize` for anything else."""
    if budget is None:
        return None
    each = list(budget) if isinstance(budget, tuple) else [budget] * count
    if len(each) != count:
        what = f"{len(each)} budgets for {count} devices"
        raise InvalidSize(what, where=name, hint="give one for all devices alike, or one for each")
    found = []
    for one in each:
        if not isinstance(one, int):
            hint = "give each device bytes, a text or a share, or no budget at all, which divides evenly"
            raise InvalidSize(f"{one!r} is not a budget of one of several devices", where=name, hint=hint)
        found.append(one)
    return found


def _of_sources(transient: Sequence[int], sources: Sequence[int]) -> tuple[int, ...]:
    """Return the transient bytes of each op, from those of the traced ops; copies have none."""
    return tuple(0 if source < 0 else transient[source] for source in sources)


def _stricter(arenas: Sequence[int] | None, totals: Sequence[int] | None, beside: Sequence[int]) -> list[int]:
    """Return the most bytes of each device's arena, where `beside` are the other bytes on each device."""
    within = [] if totals is None else [max(total - b, 0) for total, b in zip(totals, beside, strict=True)]
    return [min(limits) for limits in zip(*filter(None, (arenas, within)), strict=True)]


def _with_more(error: BudgetInfeasible, extra: int) -> BudgetInfeasible:
    """Return the error of arenas that are too small as one of totals, which are `extra` bytes larger."""
    least = error.smallest + extra
    hint = f"give each device at least {least} bytes, or more devices"
    return BudgetInfeasible(error.what, op=error.op, smallest=least, where="budget", hint=hint)


def _without_holes(
    solutions: Sequence[Solution], limits: Sequence[int], beside: Sequence[int] | None
) -> BudgetInfeasible:
    """Return the error of blocks that do not fit; `beside`: the other bytes on each device, if its total is limited."""
    sizes = [solution.arena_size for solution in solutions]
    largest = max(map(sum, zip(sizes, beside or [0] * len(sizes), strict=True)))
    return BudgetInfeasible(
        f"blocks were divided, and do not fit into {', '.join(map(format_bytes, limits))} without holes",
        op="",
        smallest=largest,
        where="arena_budget" if beside is None else "budget",
        hint=f"give each device {largest} bytes",
    )
