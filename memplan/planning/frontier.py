"""Computes the trade-off between memory and time of one scheduled graph: the cost of each of many budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.core.evictions import Action, evictions_of
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule
from memplan.core.totals import functional_transient, outside_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel, cost_model
from memplan.evict.measure import measure
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy, Workload
from memplan.planning.eager_total import eager_total
from memplan.planning.fit import Fitted, fit, make_workload, quick_of, smallest
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import PlanOptions
from memplan.planning.planner import ByteLimits, device_of, is_pinned, placed

_TRIES = 4
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The cost of one budget of the total (bytes).

    `total` are the most bytes on the device, `max_live` those of them that are live in the arena, `seconds` the
    predicted seconds of a training step and `stall` those of them spent waiting for copies; `recomputed` and
    `offloaded` are bytes per training step. `total`, `max_live` and `seconds` are None if the budget cannot be kept.
    """

    budget: int
    total: int | None = None
    max_live: int | None = None
    seconds: float | None = None
    stall: float = 0.0
    recomputed: int = 0
    offloaded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points by falling budget, including the smallest budget that can be kept. `most` (total bytes) and `base_seconds`
    are those of the step without a budget, `eager` are the bytes of the predicted eager total."""

    policy: str
    costs: str
    most: int
    eager: int
    base_seconds: float
    points: tuple[FrontierPoint, ...]

    def overhead(self, point: FrontierPoint) -> float:
        """Return the predicted slowdown of a budget that can be kept: its seconds / `base_seconds` - 1."""
        assert point.seconds is not None
        return point.seconds / self.base_seconds - 1 if self.base_seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """A frontier with the step of each of its points (None: the budget cannot be kept), and what was divided."""

    frontier: Frontier
    steps: tuple[Fitted | None, ...]
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A step and what it costs."""

    point: FrontierPoint
    step: Fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The result of another system on the same step: its setting, its total bytes, its slowdown as a share."""

    name: str
    total: int
    overhead: float


def frontier(
    graph: Graph,
    schedule: Schedule,
    *,
    alignment: int,
    costs: CostModel | str,
    policy: str | Policy = "auto",
    shares: Sequence[float] = SHARES,
    reserve: int = 0,
    host_budget: int | None = None,
    pinned_budget: int | None = None,
) -> Frontier:
    """Compute the cost of budgets: shares of the predicted eager total, the need without a budget, and the smallest.

    Budgets limit the total, `reserve` (bytes) and alignment included, as in `memplan.plan`; `host_budget` limits the
    copies on the host (bytes), and `pinned_budget` does where they are page-locked. Fragmentation, which only a plan
    shows, and kernels' temporaries, which only running shows, are left out. A budget costs no more time than a smaller
    one: what keeps the smaller one keeps it too. Raises the errors of the policy other than
    `BudgetInfeasible`.
    """
    explored = explore(
        graph,
        schedule,
        alignment=alignment,
        costs=costs,
        policy=policy,
        shares=shares,
        reserve=reserve,
        host_budget=host_budget,
        pinned_budget=pinned_budget,
    )
    return explored.frontier


def explore(
    graph: Graph,
    schedule: Schedule,
    *,
    alignment: int,
    costs: CostModel | str,
    policy: str | Policy = "auto",
    shares: Sequence[float] = SHARES,
    reserve: int = 0,
    host_budget: int | None = None,
    pinned_budget: int | None = None,
) -> Explored:
    """Compute the same as `frontier`, and keep the step that each point is the cost of."""
    decide, prices = fit_policy(policy), cost_model(costs)
    workload = make_workload(graph, schedule.order, prices, alignment)
    pinned = is_pinned(device_of(graph, workload))
    limits = ByteLimits(host_budget=host_budget, pinned_budget=pinned_budget, pinned=pinned)
    workload = replace(workload, host_budget=limits.host)
    base = measure(workload, workload.plain)
    outside = outside_bytes(graph, schedule.order, functional_transient(graph)) + reserve
    eager, least = (
        eager_total(graph) + reserve,
        fit(graph, workload.within(smallest(workload, decide)), quick_of(decide)),
    )
    lowest = _Way(point=_point(least, reserve), step=least)
    floor = lowest.point.total
    assert floor is not None
    budgets = sorted({int(eager * share) for share in shares} | {floor, base.peak + outside})
    points: list[FrontierPoint] = []
    steps: list[Fitted | None] = []
    kept: _Way | None = None
    for budget in budgets:
        if budget < floor:
            points.append(FrontierPoint(budget=budget))
            steps.append(None)
            continue
        found = _within(graph, workload.within(max(budget - outside, 0)), decide, budget=budget, reserve=reserve)
        kept = min((way for way in (lowest, kept, found) if way is not None), key=lambda way: way.point.seconds or 0.0)
        points.append(replace(kept.point, budget=budget))
        steps.append(kept.step)
    made = Frontier(
        policy=policy_name(policy),
        costs=prices.name,
        most=base.peak + outside,
        eager=eager,
        base_seconds=base.seconds,
        points=tuple(reversed(points)),
    )
    return Explored(frontier=made, steps=tuple(reversed(steps)), workload=workload)


def plans_of(explored: Explored, scheduled: ScheduledGraph) -> tuple[Plan | None, ...]:
    """Return the plan of each point of a frontier, None where the budget cannot be kept; points may share a plan.

    `scheduled` is what was explored. A plan shows what a point leaves out: fragmentation, which may make it larger.
    """
    made: dict[int, Plan] = {}
    for step in explored.steps:
        if step is not None and id(step) not in made:
            made[id(step)] = placed(scheduled, PlanOptions(), step, explored.frontier.policy, explored.workload)
    return tuple(None if step is None else made[id(step)] for step in explored.steps)


def _within(graph: Graph, workload: Workload, policy: Policy, *, budget: int, reserve: int) -> _Way | None:
    """Return a step whose total keeps `budget`, and its point; None if the policy finds none.

    `workload` has the live bytes that are left in the budget where nothing is evicted.
    """
    live = workload.budget
    for _ in range(_TRIES):
        try:
            step = fit(graph, workload.within(max(live, 0)), policy)
        except BudgetInfeasible:
            return None
        point = _point(step, reserve)
        assert point.total is not None
        assert point.max_live is not None
        if point.total <= budget:
            return _Way(point=point, step=step)
        live = min(live, point.max_live) - (point.total - budget)
    return None


def _point(fitted: Fitted, reserve: int) -> FrontierPoint:
    """Return the point of a step with evictions, whose budget is what it needs."""
    evictions = evictions_of(fitted.graph, fitted.instances)
    order = tuple(range(len(fitted.graph.ops)))
    outside = outside_bytes(fitted.graph, order, functional_transient(fitted.graph)) + reserve
    return FrontierPoint(
        budget=fitted.measured.peak + outside,
        total=fitted.measured.peak + outside,
        max_live=fitted.measured.peak,
        seconds=fitted.measured.seconds,
        stall=fitted.measured.stall,
        recomputed=sum(e.nbytes for e in evictions if e.action is Action.RECOMPUTE),
        offloaded=sum(e.nbytes for e in evictions if e.action is Action.OFFLOAD),
    )
