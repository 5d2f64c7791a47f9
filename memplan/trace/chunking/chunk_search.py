"""Find as few blocks as a budget needs: plan a step whole, and divided where no plan of the whole step fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.core.division import Division
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.schedule import Policy, order
from memplan.trace.traced import TracedGraph

if TYPE_CHECKING:
    from memplan.evict.workload import Workload
    from memplan.planning.budget import Budget

_Attempt = Callable[[TracedGraph, "Budget | None"], Plan]
_BLOCKS = (4, 16, 64, 256)
_WORTH = 0.99  # times the floor: more blocks have to lower it below this


def plan_divided(  # noqa: PLR0917
    traced: TracedGraph,
    allowed: Division | None,
    attempt: _Attempt,
    budget: Budget | None,
    alignment: int,
    schedule: str | Policy,
) -> Plan:
    """Return the plan that `attempt` makes with `budget` for the step with the fewest blocks for which it succeeds.

    A budget that is a share is one of the step that is tried first, which is not divided. A budget of "min" takes the
    division with the lowest floor. Where no division is allowed and one would help, `BudgetInfeasible` says by how
    much.
    """
    if allowed is not None and allowed.blocks is not None:
        return attempt(traced.divided(allowed), budget)
    if allowed is None or budget is None:
        return _whole(traced, attempt, budget, alignment)
    if budget == "min":
        steps = (traced, *_divisions(traced, allowed, alignment))
        return attempt(min(steps, key=lambda step: _floor(step, alignment)), budget)
    return _fewest(traced, allowed, attempt, _in_bytes(budget, traced, alignment, schedule), alignment)


def _whole(traced: TracedGraph, attempt: _Attempt, budget: Budget | None, alignment: int) -> Plan:
    """Return the plan without a division; if that fails, the error says what a division would bring."""
    try:
        return attempt(traced, budget)
    except BudgetInfeasible as error:
        floors = [_floor(step, alignment) for step in _divisions(traced, Division(), alignment)] if traced.again else []
        if floors:
            before, after = format_bytes(_floor(traced, alignment)), format_bytes(floors[-1])
            more = f"divide=True would lower the floor from {before} to {after}"
            error.hint = f"{error.hint}; {more}" if error.hint else more
        raise


def _fewest(traced: TracedGraph, allowed: Division, attempt: _Attempt, budget: int, alignment: int) -> Plan:
    """Return the first plan that succeeds, of the steps whose floor is within the budget; else raise the last error."""
    last, failed = traced, None
    for last in (traced, *_divisions(traced, allowed, alignment)):
        if _floor(last, alignment) <= budget:
            try:
                return attempt(last, budget)
            except BudgetInfeasible as error:
                failed = error
    if failed is not None:
        raise failed
    return attempt(last, budget)


def _divisions(traced: TracedGraph, allowed: Division, alignment: int) -> Iterator[TracedGraph]:
    """Yield the step in more and more blocks, as long as its floor falls."""
    before = float(_floor(traced, alignment))
    for blocks in _BLOCKS:
        step = traced.divided(replace(allowed, blocks=blocks))
        floor = _floor(step, alignment)
        if floor > _WORTH * before:
            return
        before = floor
        yield step


def _in_bytes(budget: Budget, traced: TracedGraph, alignment: int, schedule: str | Policy) -> int:
    """Return the budget in bytes; a share is one of the undivided step's arena."""
    from memplan.evict.select import fit_policy
    from memplan.planning.budget import bytes_of

    workload = _workload(traced, order(traced.graph, schedule).order, alignment)
    return bytes_of(budget, workload, fit_policy("auto"))


def _floor(traced: TracedGraph, alignment: int) -> int:
    """Return the bytes that the op with the largest working set needs at once."""
    from memplan.evict.workload_limits import floor

    return floor(_workload(traced, tuple(range(len(traced.graph.ops))), alignment))[0]


def _workload(traced: TracedGraph, order: tuple[int, ...], alignment: int) -> Workload:
    """Return the step in this order as a workload."""
    from memplan.evict.costs import DEVICES
    from memplan.planning.fit import make_workload

    return make_workload(traced.graph, order, DEVICES["cpu"], alignment, device="".join(traced.runs_on[:1]))
