"""The variants of a step that are planned: in more and more blocks of rows.

A budget is kept with as few blocks as it needs. Code is generated anew for each variant, and nothing is compiled until
one is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memplan.core.division import NOTHING, Division
from memplan.core.graph import Graph
from memplan.core.schedule import live_bytes
from memplan.core.totals import MODEL_KINDS, known_transient, outside_bytes
from memplan.devices.kinds import is_accelerator
from memplan.errors import UnsupportedGraph
from memplan.evict.workload import Workload
from memplan.planning.options import PlanOptions
from memplan.schedule import order
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, retraced

if TYPE_CHECKING:
    from memplan.evict.workload import Workload

_BLOCKS = (4, 16, 64, 256)
_HEAD_BLOCKS = 8  # of a loss head that is divided without being asked for
_WORTH = 0.99  # times the floor: more blocks have to lower it below this
_log = logging.getLogger("memplan")


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
    if options.divide is None and retracer is not None:
        return _with_divided_head(traced, retracer, options, alignment)
    if allowed is not None and allowed.blocks is not None:
        return (retraced(traced, retracer, allowed, traced.compress),), options
    if allowed is None or (options.budget is None and options.arena_budget is None):
        return (traced,), options
    variants = (traced, *_whole(traced, retracer, options), *_divisions(traced, retracer, allowed, alignment))
    if "min" in (options.budget, options.arena_budget):
        return (min(variants, key=lambda variant: _floor(variant, alignment)),), options
    asked = in_bytes(options, traced, alignment)
    fitting = tuple(variant for variant in variants if _may_fit(variant, asked, alignment))
    return fitting or variants[-1:], asked


def _with_divided_head(
    traced: TracedGraph, retracer: CapturedCall, options: PlanOptions, alignment: int
) -> tuple[tuple[TracedGraph, ...], PlanOptions]:
    """Return the variants where nobody said whether to divide: on an accelerator, a loss head that runs in blocks of
    rows, whose gradients the forward computes, comes before anything is evicted. It takes hardly more time, and its
    gradients are equal up to rounding. Budgets of generated kernels are in bytes here, or "min".
    """
    limited = options.budget is not None or options.arena_budget is not None
    if not (limited and traced.training and options.kernels == "inductor" and is_accelerator(traced.device)):
        return (traced,), options
    minimal = "min" in (options.budget, options.arena_budget)
    if not minimal:
        workload = _workload(traced, tuple(range(len(traced.graph.ops))), alignment)
        if _most_live(traced.graph) <= _arena_limit(traced.graph, workload, options):
            return (traced,), options
    wanted = Division(blocks=_HEAD_BLOCKS, sums=True)
    try:
        divided = retraced(traced, retracer, wanted, traced.compress)
    except UnsupportedGraph as refused:
        _log.info("the loss head is not divided: %s", refused.summary)
        return (traced,), options
    if divided.division is None or divided.division.over == NOTHING:
        return (traced,), options
    if minimal:
        return (min((divided, traced), key=lambda variant: _floor(variant, alignment)),), options
    return (divided, traced), options


def _whole(traced: TracedGraph, retracer: CapturedCall | None, options: PlanOptions) -> Iterator[TracedGraph]:
    """Yield the undivided step with sums in place, where Inductor's kernels may run it."""
    if options.kernels == "inductor" and options.division is not None and options.division.sums:
        yield retraced(traced, retracer, replace(options.division, blocks=1), traced.compress)


def _divisions(
    traced: TracedGraph, retracer: CapturedCall | None, allowed: Division, alignment: int
) -> Iterator[TracedGraph]:
    """Yield the step in more and more blocks, as long as its floor falls."""
    before = float(_floor(traced, alignment))
    for blocks in _BLOCKS:
        step = retraced(traced, retracer, replace(allowed, blocks=blocks), traced.compress)
        floor = _floor(step, alignment)
        if floor > _WORTH * before:
            return
        before = floor
        yield step


def in_bytes(options: PlanOptions, traced: TracedGraph, alignment: int) -> PlanOptions:
    """Return the options with budgets in bytes; shares are those of the undivided step."""
    from memplan.planning.planner import budgets_in_bytes

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
    from memplan.evict.workload import floor

    return floor(_workload(traced, tuple(range(len(traced.graph.ops))), alignment))[0]


def _workload(traced: TracedGraph, order: tuple[int, ...], alignment: int) -> Workload:
    """Return the step in this order as a workload."""
    from memplan.evict.costs import DEVICES
    from memplan.planning.fit import make_workload

    return make_workload(traced.graph, order, DEVICES["cpu"], alignment, device="".join(traced.runs_on[:1]))


def _arena_limit(graph: Graph, workload: Workload, options: PlanOptions) -> int:
    """Return the bytes that budgets in bytes leave for the arena, beside what is known to be outside."""
    outside = outside_bytes(graph, workload.sources, known_transient(graph)) + options.reserved
    pairs = ((options.budget, outside), (options.arena_budget, 0))
    return max(min(limit - other for limit, other in pairs if isinstance(limit, int)), 0)


def _most_live(graph: Graph) -> int:
    return max(live_bytes(graph, tuple(range(len(graph.ops)))), default=0)
