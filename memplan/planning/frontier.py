"""Asks for the plan of one step under each of many budgets: the trade-off between memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memplan.core.evictions import Action
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel, cost_model
from memplan.evict.policies import policy_name
from memplan.planning.base_graph import eager_total
from memplan.planning.budget import plan_within
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import DEFAULTS, PlanOptions

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A budget of the total (bytes), and the plan that keeps it; None if it cannot be kept."""

    budget: int
    plan: Plan | None = None

    @property
    def total(self) -> int:
        """The most bytes on the device."""
        return 0 if self.plan is None else self.plan.on_device

    @property
    def seconds(self) -> float:
        """The predicted seconds of a training step."""
        return 0.0 if self.plan is None or self.plan.eviction is None else self.plan.eviction.seconds

    @property
    def overhead(self) -> float:
        """The predicted slowdown: the seconds as a share of those without a budget, less 1."""
        return 0.0 if self.plan is None or self.plan.eviction is None else self.plan.eviction.overhead

    @property
    def stall(self) -> float:
        """The seconds that are spent waiting for copies."""
        return 0.0 if self.plan is None or self.plan.eviction is None else self.plan.eviction.stall

    def evicted(self, action: Action) -> int:
        """Return the bytes per training step that return in this way."""
        return 0 if self.plan is None else sum(e.nbytes for e in self.plan.evictions if e.action is action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points by falling budget, including the smallest budget that can be kept. `most` (total bytes) and `base_seconds`
    are those of the step with nothing evicted, `eager` are the bytes of the predicted eager total. A loss head runs in
    `blocks` of rows; 0: it is whole."""

    policy: str
    costs: str
    most: int
    eager: int
    base_seconds: float
    blocks: int = 0
    points: tuple[FrontierPoint, ...]


def frontier(
    scheduled: ScheduledGraph,
    options: PlanOptions = DEFAULTS,
    *,
    costs: CostModel | str,
    shares: Sequence[float] = SHARES,
    eager: int | None = None,
    blocks: int = 0,
) -> Frontier:
    """Return the plans of a step for budgets: shares of the predicted eager total, the need without a budget, and the
    smallest.

    The plans are those of `memplan.plan(..., budget=...)` with the other options of `options`; what only running
    shows, the temporaries of kernels, is left out. A budget costs no more time than a smaller one: what keeps the
    smaller one keeps it too. `eager` is the eager total; None: that of the graph, which is too little where a loss head
    is in `blocks`. Raises the errors of the policy other than `BudgetInfeasible`.
    """
    prices = cost_model(costs)
    eager = (eager_total(scheduled.graph) if eager is None else eager) + options.reserved
    base = plan_within(scheduled, replace(options, budget=max(eager, 1) << 20), prices)
    kept = least = plan_within(scheduled, replace(options, budget="min"), prices)
    points = []
    for budget in sorted({int(eager * share) for share in shares} | {least.on_device, base.on_device}):
        if budget < least.on_device:
            points.append(FrontierPoint(budget=budget))
            continue
        try:
            found = plan_within(scheduled, replace(options, budget=budget), prices)
        except BudgetInfeasible:
            found = least
        kept = min((kept, found), key=_seconds)
        points.append(FrontierPoint(budget=budget, plan=kept))
    return Frontier(
        policy=policy_name(options.policy),
        costs=prices.name,
        most=base.on_device,
        eager=eager,
        base_seconds=_seconds(base),
        blocks=blocks,
        points=tuple(reversed(points)),
    )


def _seconds(plan: Plan) -> float:
    assert plan.eviction is not None
    return plan.eviction.seconds
