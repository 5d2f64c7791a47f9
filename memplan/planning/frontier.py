"""The frontier between memory and time: what each budget costs, for one scheduled graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memplan.core.evictions import Action, evictions_of
from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel
from memplan.evict.judge.arrays import measure
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Policy
from memplan.planning.budget import cost_model
from memplan.planning.fit import fit, make_workload, smallest

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One budget: bytes that are alive at most (`max_live`), predicted seconds of a step and those spent waiting for
    copies, and how many bytes are computed again and copied to the host in each step. None: it cannot be kept.
    """

    budget: int
    max_live: int | None = None
    seconds: float | None = None
    stall: float = 0.0
    recomputed: int = 0
    offloaded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points by falling budget, the smallest that can be kept among them; `most` bytes, `base_seconds`: without one."""

    policy: str
    costs: str
    most: int
    base_seconds: float
    points: tuple[FrontierPoint, ...]

    def overhead(self, point: FrontierPoint) -> float:
        """Predicted seconds of a point that can be kept over those without a budget, less 1."""
        assert point.seconds is not None
        return point.seconds / self.base_seconds - 1 if self.base_seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What another system makes of the same step: its setting, the bytes that are really alive, its overhead."""

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
    """The price of each share of what the step needs without a budget, down to the smallest budget.

    Bytes are live bytes, alignment included: what arenas of that size can hold when no place is lost, which
    `memplan.plan` finds out. Raises what the policy raises, but no `BudgetInfeasible`.
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
        except BudgetInfeasible:  # found at another budget by luck
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
