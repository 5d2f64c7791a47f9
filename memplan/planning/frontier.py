"""Computes the trade-off between memory and time of one scheduled graph: the cost of each of many budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.core.evictions import Action, evictions_of
from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel, cost_model
from memplan.evict.judge.arrays import measure
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy
from memplan.planning.fit import fit, make_workload, smallest

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The cost of one budget (bytes).

    `max_live` are the most live bytes, `seconds` the predicted seconds of a training step and `stall` those of them
    spent waiting for copies; `recomputed` and `offloaded` are bytes per training step. `max_live` and `seconds` are
    None if the budget cannot be kept.
    """

    budget: int
    max_live: int | None = None
    seconds: float | None = None
    stall: float = 0.0
    recomputed: int = 0
    offloaded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points by falling budget, including the smallest budget that can be kept. `most` (bytes) and `base_seconds` are
    those of the step without a budget."""

    policy: str
    costs: str
    most: int
    base_seconds: float
    points: tuple[FrontierPoint, ...]

    def overhead(self, point: FrontierPoint) -> float:
        """Return the predicted slowdown of a budget that can be kept: its seconds / `base_seconds` - 1."""
        assert point.seconds is not None
        return point.seconds / self.base_seconds - 1 if self.base_seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The result of another system on the same step: its setting, its measured live bytes, its slowdown as a share."""

    name: str
    max_live: int
    overhead: float


def frontier(
    graph: Graph,
    schedule: Schedule,
    *,
    alignment: int,
    costs: CostModel | str,
    policy: str | Policy = "auto",
    shares: Sequence[float] = SHARES,
) -> Frontier:
    """Compute the cost of budgets that are shares of the bytes needed without a budget, and of the smallest budget.

    Budgets limit live bytes, alignment included, and leave out fragmentation, which only `memplan.plan` computes.
    Raises the errors of the policy other than `BudgetInfeasible`.
    """
    decide, prices = fit_policy(policy), cost_model(costs)
    workload = make_workload(graph, schedule.order, prices, alignment)
    base = measure(workload, workload.plain)
    least = smallest(workload, decide)
    budgets = sorted({int(base.peak * share) for share in shares} | {least}, reverse=True)
    points = []
    for budget in budgets:
        if budget < least:
            points.append(FrontierPoint(budget=budget))
            continue
        try:
            fitted = fit(graph, workload.within(budget), decide)
        except BudgetInfeasible:  # the policy found a solution for a smaller budget only
            points.append(FrontierPoint(budget=budget))
            continue
        evictions = evictions_of(fitted.graph, fitted.instances)
        points.append(
            FrontierPoint(
                budget=budget,
                max_live=fitted.measured.peak,
                seconds=fitted.measured.seconds,
                stall=fitted.measured.stall,
                recomputed=sum(e.nbytes for e in evictions if e.action is Action.RECOMPUTE),
                offloaded=sum(e.nbytes for e in evictions if e.action is Action.OFFLOAD),
            )
        )
    return Frontier(
        policy=policy_name(policy), costs=prices.name, most=base.peak, base_seconds=base.seconds, points=tuple(points)
    )
