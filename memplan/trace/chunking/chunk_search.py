"""Find as few blocks as a budget needs: the variants of a step to plan, whole and in more and more blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.core.division import Division
from memplan.core.totals import MODEL_KINDS
from memplan.core.units import format_bytes
from memplan.planning.options import PlanOptions
from memplan.schedule import order
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, retraced

if TYPE_CHECKING:
    from memplan.evict.workload import Workload

_BLOCKS = (4, 16, 64, 256)
_WORTH = 0.99  # times the floor: more blocks have to lower it below this


def variants_to_plan(
    traced: TracedGraph, retracer: CapturedCall | None, options: PlanOptions, alignment: int
) -> tuple[tuple[TracedGraph, ...], PlanOptions]:
    """Return the variants of a step to plan, one after the other until one keeps the budget, and the options for them.

    The undivided step comes first, then the variant with the fewest blocks. A budget that is a share is one of the
    undivided step, so it is turned into bytes where there are several variants. For a budget of "min", the only
    variant is the one with the lowest floor. Variants whose floor exceeds the budget are left out; if all do, the
    last one is kept, whose error names what it needs.
    """
    allowed = options.division
    if allowed is not None and allowed.blocks is not None:
        return (retraced(traced, retracer, allowed, traced.compress, traced.code),), options
    if allowed is None or (options.budget is None and options.arena_budget is None):
        return (traced,), options
    variants = (traced, *_whole(traced, retracer, options), *_divisions(traced, retracer, allowed, alignment))
    if "min" in (options.budget, options.arena_budget):
        return (min(variants, key=lambda variant: _floor(variant, alignment)),), options
    asked = in_bytes(options, traced, alignment)
    fitting = tuple(variant for variant in variants if _may_fit(variant, asked, alignment))
    return fitting or variants[-1:], asked


def _whole(traced: TracedGraph, retracer: CapturedCall | None, options: PlanOptions) -> Iterator[TracedGraph]:
    """Yield the undivided step with sums in place, where Inductor's kernels may run it."""
    if options.kernels == "inductor" and options.division is not None and options.division.sums:
        yield retraced(traced, retracer, replace(options.division, blocks=1), traced.compress, traced.code)


def gain_of_dividing(traced: TracedGraph, retracer: CapturedCall, alignment: int, *, sums: bool = False) -> str:
    """Return what a division would bring for a step that does not fit, as a hint; "" if it would bring nothing.

    `sums` is as in `Division`.
    """
    floors = [_floor(variant, alignment) for variant in _divisions(traced, retracer, Division(sums=sums), alignment)]
    if not floors:
        return ""
    before, after = format_bytes(_floor(traced, alignment)), format_bytes(floors[-1])
    asked = "memplan.Division(sums=True)" if sums else "True"
    return f"divide={asked} would lower the floor from {before} to {after}"


def _divisions(
    traced: TracedGraph, retracer: CapturedCall | None, allowed: Division, alignment: int
) -> Iterator[TracedGraph]:
    """Yield the step in more and more blocks, as long as its floor falls."""
    before = float(_floor(traced, alignment))
    for blocks in _BLOCKS:
        step = retraced(traced, retracer, replace(allowed, blocks=blocks), traced.compress, traced.code)
        floor = _floor(step, alignment)
        if floor > _WORTH * before:
            return
        before = floor
        yield step


def in_bytes(options: PlanOptions, traced: TracedGraph, alignment: int) -> PlanOptions:
    """Return the options with budgets in bytes; shares are those of the undivided step."""
    from memplan.planning.byte_limits import budgets_in_bytes

    workload = _workload(traced, order(traced.graph, options.schedule).order, alignment)
    return budgets_in_bytes(options, traced.graph, workload)


def _may_fit(traced: TracedGraph, asked: PlanOptions, alignment: int) -> bool:
    """Return whether the floor of a step, with its model and inputs beside it, is within budgets in bytes."""
    beside = 0 if traced.runs_on else traced.graph.bytes_of(*MODEL_KINDS)
    limits = ((asked.arena_budget, 0), (asked.budget, beside + asked.reserved))
    floor = _floor(traced, alignment)
    return all(not isinstance(limit, int) or floor + extra <= limit for limit, extra in limits)


def _floor(traced: TracedGraph, alignment: int) -> int:
    """Return the bytes that the op with the largest working set needs at once."""
    from memplan.evict.workload_limits import floor

    return floor(_workload(traced, tuple(range(len(traced.graph.ops))), alignment))[0]


def _workload(traced: TracedGraph, order: tuple[int, ...], alignment: int) -> Workload:
    """Return the step in this order as a workload."""
    from memplan.evict.costs import DEVICES
    from memplan.planning.fit import make_workload

    return make_workload(traced.graph, order, DEVICES["cpu"], alignment, device="".join(traced.runs_on[:1]))
