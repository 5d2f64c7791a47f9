"""The variants of a step that are planned: in more and more blocks of rows.

A budget is kept with as few blocks as it needs. Code is generated anew for each variant, and nothing is compiled until
one is taken. A step that a budget wants with its loss head in blocks is generated so at once: what the undivided one
needs is estimated from it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from memplan.core.division import HEAD, Division
from memplan.core.graph import Graph, Phase
from memplan.core.in_place import without_candidates
from memplan.core.schedule import live_bytes
from memplan.core.totals import MODEL_KINDS
from memplan.devices.kinds import is_accelerator
from memplan.errors import UnsupportedGraph
from memplan.evict.workload import Workload
from memplan.planning.options import PlanOptions, read_budget
from memplan.schedule import order
from memplan.trace.chunking.rows import FIRST_ROWS
from memplan.trace.passes.nodes import most_alive, tensors_of
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, retraced

_BLOCKS = (4, 16, 64, 256)
_WORTH = 0.99  # times the floor: more blocks have to lower it below this
_log = logging.getLogger("memplan")


def variants_to_plan(
    traced: TracedGraph, retracer: CapturedCall | None, options: PlanOptions, alignment: int
) -> tuple[tuple[TracedGraph, ...], PlanOptions]:
    """Return the variants of a step to plan, one after the other until one keeps the budget, and the options for them.

    `traced` comes first, then the variant with the fewest blocks. A budget that is a share is one of the undivided
    step, so it is turned into bytes where there are several variants. For a budget of "min", the only variant is the
    one with the lowest floor. Variants whose floor exceeds the budget are left out; if all do, the last one is kept,
    whose error names what it needs.
    """
    allowed = options.division
    if allowed is not None and allowed.blocks is not None:
        return (retraced(traced, retracer, allowed, traced.compress),), options
    if allowed is None or (options.budget is None and options.arena_budget is None):
        return (traced,), options
    variants = (traced, *_divisions(traced, retracer, allowed, alignment))
    if "min" in (options.budget, options.arena_budget):
        return (min(variants, key=lambda variant: _floor(variant, alignment)),), options
    asked = in_bytes(options, traced, alignment)
    fitting = tuple(variant for variant in variants if _may_fit(variant, asked, alignment))
    return fitting or variants[-1:], asked


def first_variant(step: CapturedCall, options: PlanOptions) -> TracedGraph:
    """Return the variant of a step to plan first, and the only one where nobody said whether to divide.

    That is one whose loss head runs in blocks of rows, where a budget of generated kernels on an accelerator may be
    less than the undivided step needs; else the undivided one. A head in blocks takes hardly more time, because the
    forward computes its gradients, which are equal up to rounding.
    """
    limited = options.budget is not None or options.arena_budget is not None
    if limited and options.divide is None and options.kernels == "inductor" and step.captured.training:
        nodes = list(step.captured.graph_module.graph.nodes)
        if any(is_accelerator(tensor.device) for tensor in tensors_of(nodes)) and _may_exceed(
            nodes, options, step.state
        ):
            try:
                return step.retrace(division=HEAD)
            except UnsupportedGraph as refused:
                _log.info("the loss head is not divided: %s", refused.summary)
    return step.retrace()


def _may_exceed(nodes: Sequence[fx.Node], options: PlanOptions, state: int) -> bool:
    """Return whether a step may need more than a budget: a share, "min", or fewer bytes than eager may have alive, with
    its inputs, the `state` of the optimizer and what is set aside beside that.
    """
    budgets = [read_budget(b) for b in (options.budget, options.arena_budget) if isinstance(b, (int, float, str))]
    given = sum(t.numel() * t.itemsize for t in tensors_of([n for n in nodes if n.op == "placeholder"]))
    most = most_alive(nodes) + given + state + options.reserved
    return any(b == "min" or b < (1 if isinstance(b, float) else most) for b in budgets)


def _of_whole_head(graph: Graph, blocks: int) -> tuple[int, int]:
    """Return the most bytes that would be alive if a loss head in so many blocks were whole: by a plan, where its
    gradient lies over what it computes, and in eager.
    """
    rows = [i for i, op in enumerate(graph.ops) if FIRST_ROWS in op.origin.node]
    if not rows or any(graph.ops[i].phase is not Phase.FORWARD for i in rows):
        return 0, 0
    made = [graph.values[v] for i in rows for v in graph.ops[i].writes]
    wide = max(math.prod(value.shape) * value.itemsize for value in made) * blocks
    before = live_bytes(without_candidates(graph), tuple(range(len(graph.ops))))[max(rows[0] - 1, 0)]
    return before + wide, before + 2 * wide


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
    blocks = traced.division and traced.division.blocks
    whole = _of_whole_head(traced.graph, blocks) if blocks else (0, 0)
    return budgets_in_bytes(options, traced.graph, workload, whole=whole)


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
