"""Makes a plan for several devices: the step of one device, partitioned by blocks, with an arena placed on each.

A block is a module whose path ends in a number ("h.3"); it includes its submodules, their backward and their updates.
Paths are cut at the smallest depth that gives enough units; other modules are units of their own. Each device gets a
contiguous run of units, chosen by dynamic programming. Every run has a price: its max live bytes, with copies of the
storages that it reads from other devices (without in-place reuse, so never too few), and the seconds of the transfers
to it, which are minimized under the budgets. Without budgets, the largest device may need a tenth more bytes than where
it needs the fewest (PipeDream, Narayanan et al. 2019, divides layers by time in this way).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from memplan.core import lifetimes
from memplan.core.evictions import TRANSFERS, DeviceArena, EvictionPlan
from memplan.core.graph import Graph, Phase
from memplan.core.plan import Plan
from memplan.core.problem import Solution, Status
from memplan.core.schedule import make_schedule
from memplan.core.totals import known_transient, transient_on
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidSize, MemplanError
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import CostModel, Link, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.planning.divide import devices_of, divide
from memplan.planning.fit import make_workload
from memplan.planning.make_plan import ScheduledGraph, solved
from memplan.planning.options import PlanOptions
from memplan.planning.planner import budgets_in_bytes
from memplan.solvers import solve

_POLICY = "blocks"  # the name of the policy in plans
_PER_DEVICE = 3  # units per device, so that devices can be balanced
_DEEPEST = 4
_SLACK = 1.1  # times the smallest possible size of the largest device: bytes traded for shorter transfers


def units_of(graph: Graph, devices: int) -> tuple[int, ...]:
    """Return the unit of each op of `graph`, in the order of the forward; the ops are in schedule order.

    Copies to and from the host, which follow their storage, have -1. Without blocks, the units are single modules.
    """
    for depth in range(1, _DEEPEST + 1):
        found = _cut(graph, depth)
        if max(found) >= _PER_DEVICE * devices - 1:
            return found
    return found if max(found) >= devices - 1 else _cut(graph, 0)


def _cut(graph: Graph, depth: int) -> tuple[int, ...]:
    """Return the unit of each op where module paths are cut at this depth.

    An op of the forward is of its block, or of the unit before it; another one of that of its module, or of what made
    the last storage that it reads.
    """
    index: dict[str, int] = {}  # block -> unit
    home: dict[str, int] = {}  # module -> unit of its first op
    found = [-1] * len(graph.ops)
    current = 0
    for i, op in enumerate(graph.ops):
        if op.phase is Phase.FORWARD and op.target not in TRANSFERS:
            block = _block(op.origin.module, depth)
            if _is_block(block) or block not in index:
                current = index.setdefault(block, len(index))
            found[i] = home.setdefault(op.origin.module, current) if _is_block(block) else current
    made: dict[int, int] = {}  # storage -> unit of its last writer
    for i, op in enumerate(graph.ops):
        if op.target in TRANSFERS:
            continue
        if found[i] < 0:
            near = index.get(_block(op.origin.module, depth), home.get(op.origin.module, -1))
            read = [made[s] for v in op.reads if (s := graph.values[v].storage) in made]
            found[i] = near if near >= 0 and op.origin.module else read[-1] if read else current
        current = found[i]
        made.update(dict.fromkeys(graph.written(op), current))
    return tuple(found)


def _is_block(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _block(module: str, depth: int) -> str:
    """Return a module path up to its `depth`-th number, or to its last if it has fewer; all of one that has none."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[min(depth, len(numbers)) - 1] + 1]) if numbers and depth else module


def assign(
    graph: Graph, units: Sequence[int], budgets: Sequence[int] | None, *, link: Link, alignment: int, count: int
) -> tuple[int, tuple[int, ...]]:
    """Return the bytes by which a device exceeds its budget, and the runs of units of the devices that exceed it least.

    Device k runs the units [ends[k - 1], ends[k]), device 0 those before ends[0]. `budgets` are the most bytes of each
    device's arena; None balances the devices.
    """
    touched = _touched(graph, units)
    sizes = {s: -(-graph.storages[s].nbytes // alignment) * alignment for s in touched}
    m = max(units) + 1

    @cache
    def price(start: int, end: int) -> tuple[int, float]:
        """Return the max live bytes of a device that runs these units, and the seconds of transfers to it."""
        change = np.zeros(len(graph.ops) + 1, np.int64)
        seconds = 0.0
        for s, touches in touched.items():
            home = next((unit for _, unit in touches if unit >= 0), 0)
            here = [step for step, unit in touches if start <= unit < end]
            if start <= home < end:
                here = [touches[0][0], touches[-1][0]]
            elif here:
                seconds += link.seconds(sizes[s])
            else:
                continue
            change[here[0]] += sizes[s]
            change[here[-1] + 1] -= sizes[s]
        return int(np.cumsum(change).max(initial=0)), seconds

    def best(limits: Sequence[int]) -> tuple[int, float, tuple[int, ...]]:
        """Return the least excess over the limits, the seconds of transfers, and the ends of the runs."""
        ways: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
        for k, limit in enumerate(limits):
            after = {}
            for end in range(m + 1) if k < count - 1 else (m,):
                found = []
                for start, (over, seconds, ends) in ways.items():
                    if start <= end:
                        nbytes, more = price(start, end)
                        found.append((max(over, nbytes - limit), seconds + more, (*ends, end)))
                after[end] = min(found)
            ways = after
        return ways[m]

    over, _, ends = best([int(best([0] * count)[0] * _SLACK)] * count if budgets is None else budgets)
    return over, ends


def _touched(graph: Graph, units: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return (step, unit) of each op that touches a planned storage."""
    found: dict[int, list[tuple[int, int]]] = {}
    for step, op in enumerate(graph.ops):
        for s in graph.touched(op):
            if graph.storages[s].planned:
                found.setdefault(s, []).append((step, units[step]))
    return found


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
    known = known_transient(graph) if transient is None else tuple(transient)
    most = max(known, default=0) + scheduled.reserve  # beside the arena of a device
    whole = apply(workload, flow(workload))
    units = units_of(whole.graph, len(devices))
    divided_into = partial(assign, whole.graph, units, link=costs.to_device, alignment=alignment, count=len(devices))

    def limits(beside: Sequence[int]) -> list[int] | None:
        """Return the most bytes of each arena, where these are beside them; None for no limit."""
        rest = None if totals is None else [max(total - b, 0) for total, b in zip(totals, beside, strict=True)]
        given = [one for one in (arenas, rest) if one is not None]
        return [min(each) for each in zip(*given, strict=True)] if given else None

    beside = [scheduled.reserve] * len(devices)  # at first; what runs on which device decides the rest
    for number in range(1 if totals is None else 3):
        wanted = limits(beside)
        over, ends = divided_into(wanted)
        if wanted is not None and over > 0:
            raise _infeasible(divided_into([0] * len(devices))[0] + (0 if totals is None else most), asked)
        device_of = [bisect_right(ends, unit) if unit >= 0 else -1 for unit in units]
        divided, sources = divide(whole.graph, whole.sources, devices_of(whole.graph, device_of), devices)
        require_equivalent(graph, divided, sources)
        order = make_schedule(divided, tuple(range(len(divided.ops))), scheduled.schedule.policy)
        partitioned = replace(scheduled, graph=divided, schedule=order)
        problem = partitioned.problem
        parts = [lifetimes.device_problem(problem, divided, device) for device in devices]
        solutions = [solved(part, options) for part in parts]
        temporaries = (
            known_transient(divided)
            if transient is None
            else tuple(0 if source < 0 else known[source] for source in sources)
        )
        outside = [transient_on(divided, temporaries, device) + scheduled.reserve for device in devices]
        allowed = limits(outside) if not scheduled.redzone else None
        sizes = [solution.arena_size for solution in solutions]
        starts = accumulate(sizes, initial=0)
        rows = zip(devices, starts, sizes, parts, allowed or sizes, totals or repeat(None), strict=False)
        sections = tuple(
            DeviceArena(device=name, start=start, size=size, max_live=part.max_live, arena_budget=limit, budget=total)
            for name, start, size, part, limit, total in rows
        )
        over = max(section.size - section.arena_budget for section in sections)
        if over <= 0:
            break
        beside = [most] * len(devices) if number else outside
    else:  # too much is outside of the arenas, or they have holes
        raise _infeasible(max(section.budget or section.arena_budget for section in sections) + over, asked)
    plan = partitioned.plan(problem, _side_by_side(sections, solutions))
    plan = plan if transient is None else replace(plan, temporaries=temporaries)
    return replace(plan, eviction=_record(plan, whole, sources, sections, costs))


def _infeasible(needed: int, asked: PlanOptions) -> BudgetInfeasible:
    """Return the error of blocks that do not fit: in the best assignment, a device needs so many bytes."""
    return BudgetInfeasible(
        f"no assignment of blocks fits: in the best one, a device needs {format_bytes(needed)}",
        op="",
        smallest=needed,
        where="arena_budget" if asked.budget is None else "budget",
        hint=f"give each device at least {needed} bytes, or more devices",
    )


def _record(
    plan: Plan, whole: Applied, sources: tuple[int, ...], sections: tuple[DeviceArena, ...], costs: CostModel
) -> EvictionPlan:
    """Return the record of the devices' arenas and of the predicted seconds of the step."""
    seconds, stall = simulate(plan.graph, costs)
    return EvictionPlan(
        policy=_POLICY,
        costs=costs.name,
        arena_budget=sum(section.arena_budget for section in sections),
        seconds=seconds,
        base_seconds=simulate(whole.graph, costs)[0],
        stall=stall,
        sources=sources,
        instances=whole.instances,
        host=solve(lifetimes.host_problem(plan.graph, plan.schedule, alignment=plan.alignment)),
        device=", ".join(section.device for section in sections),
        sections=sections,
    )


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
    each: list[Any] = list(budget) if isinstance(budget, tuple) else [budget] * count
    if len(each) != count:
        what = f"{len(each)} budgets for {count} devices"
        raise InvalidSize(what, where=name, hint="give one for all devices alike, or one for each")
    for one in each:
        if not isinstance(one, int):
            hint = "give each device bytes, a text or a share, or no budget at all, which divides evenly"
            raise InvalidSize(f"{one!r} is not a budget of one of several devices", where=name, hint=hint)
    return each
