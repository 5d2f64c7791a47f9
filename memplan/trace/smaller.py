"""As few blocks as a budget needs: plan a step whole, and divided where that finds no way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.division import Division
from memplan.errors import BudgetInfeasible
from memplan.plan import Plan
from memplan.schedule import Policy, order
from memplan.trace.traced import TracedGraph
from memplan.units import format_bytes

if TYPE_CHECKING:
    from memplan.budget import Budget

_BLOCKS = (4, 16, 64, 256)
_WORTH = 0.99  # of the floor: more blocks that lower it by less are not tried


def plan_divided(
    traced: TracedGraph,
    allowed: Division | None,
    attempt: Callable[[TracedGraph, Budget | None], Plan],
    budget: Budget | None,
    alignment: int,
    schedule: str | Policy,
) -> Plan:
    """`attempt` with `budget` on the step with the fewest blocks with which it succeeds, none if that does.

    A budget that is a share is one of the step that is tried first. Where no attempt succeeds, the error says how far a division would lower the floor, or did. A budget of "min" takes the
    division with the lowest floor.
    """
    if allowed is not None and allowed.blocks is not None:
        return attempt(traced.divided(allowed), budget)
    if allowed is not None and budget == "min":
        steps = (traced, *_divisions(traced, allowed, alignment))
        return attempt(min(steps, key=lambda step: _floor(step, alignment)), budget)
    try:
        return attempt(traced, budget)
    except BudgetInfeasible as error:
        if traced.again is None:
            raise
        infeasible = error
    before = lowest = _floor(traced, alignment)
    limit = budget if allowed is None else _in_bytes(budget, traced, alignment, schedule)
    for step in _divisions(traced, allowed or Division(), alignment):
        lowest = min(lowest, _floor(step, alignment))
        if allowed is not None:
            try:
                return attempt(step, limit)
            except BudgetInfeasible as error:
                infeasible = error
    if lowest < before:
        verb = "would lower" if allowed is None else "lowers"
        more = f"divide=True {verb} the floor from {format_bytes(before)} to {format_bytes(lowest)}"
        infeasible.hint = f"{infeasible.hint}; {more}" if infeasible.hint else more
    raise infeasible


def _divisions(traced: TracedGraph, allowed: Division, alignment: int) -> Iterator[TracedGraph]:
    """The step in more and more blocks, as long as its floor falls."""
    before = float(_floor(traced, alignment))
    for blocks in _BLOCKS:
        step = traced.divided(replace(allowed, blocks=blocks))
        floor = _floor(step, alignment)
        if floor > _WORTH * before:
            return
        before = floor
        yield step


def _in_bytes(budget: Budget | None, traced: TracedGraph, alignment: int, schedule: str | Policy) -> Budget | None:
    """A share, of what this step needs."""
    from memplan.budget import bytes_of

    if not isinstance(budget, float) and not (isinstance(budget, str) and budget.strip().endswith("%")):
        return budget
    return bytes_of(budget, traced.graph, order(traced.graph, schedule).order, alignment)


def _floor(traced: TracedGraph, alignment: int) -> int:
    """Bytes that the hungriest op needs at once."""
    from memplan.evict.costs import DEVICES
    from memplan.evict.fit import make_workload
    from memplan.evict.floor import floor

    order = tuple(range(len(traced.graph.ops)))
    return floor(make_workload(traced.graph, order, DEVICES["cpu"], alignment))[0]
