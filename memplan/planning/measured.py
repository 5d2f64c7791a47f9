"""Decides what a plan leaves outside the arena once a trial run has shown what kernels allocate by themselves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from memplan.core.graph import Graph, StorageKind
from memplan.core.plan import Plan
from memplan.core.totals import beside_results
from memplan.core.units import format_bytes
from memplan.planning.base_graph import eager_total
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import plan_partly_outside, plan_without_copies
from memplan.planning.planner import is_pinned

_PRECISION = 1000  # the prediction of eager's peak is exact to about one part in so many
_log = logging.getLogger("memplan")


def with_temporaries(plan: Plan, transient: Sequence[int]) -> Plan:
    """Return a plan with the bytes that kernels allocate: `transient`, for each op of the step as it was traced."""
    kept = plan.eviction
    if kept is None:
        return replace(plan, temporaries=tuple(transient))
    return replace(plan, temporaries=tuple(0 if s < 0 else transient[s] for s in kept.sources))


def no_more_than_eager(
    plan: Plan, graph: Graph, transient: Sequence[int], options: PlanOptions, *, saved: bool
) -> Plan | None:
    """Return a plan of the same order that needs fewer bytes, for one that needs more than eager; None if it stays.

    Where kernels return new memory, as convolutions do, the arena and what is beside it may have their peaks at
    different steps, and eager's peak is below their sum. Results then leave the arena. Nothing is evicted: nobody asked
    for a budget.

    Args:
        plan: The plan, with its temporaries and without a budget.
        graph: The step as it was traced.
        transient: The bytes that each op of `graph` allocates outside the arena.
        options: Those that the plan was made with.
        saved: Activations that the backward needs may leave the arena, too. Each call allocates them, so they do only
            where nothing else helps.
    """
    away, need = _is_away(plan), _one_by_one(plan).on_device
    beside = beside_results(_placed(graph) if away else graph, transient)
    eager = eager_total(graph, beside)
    most = eager + plan.padding + options.reserved  # what eager needs, and what alignment adds
    limit = most - eager // _PRECISION
    evicts = plan.eviction is not None and plan.eviction.policy != "checkpoint"
    if need <= limit or plan.redzone or evicts:
        return None
    found = plan_partly_outside(plan, limit, options)
    if saved and need > most and plan.eviction is None and (found is None or found.on_device > limit):
        found = plan_partly_outside(plan, limit, options, saved=True)
    least = found or plan
    if least.on_device > limit:
        _log.info("%s: needs %s, and eager %s", plan.model, *map(format_bytes, (least.on_device, limit)))
    return found


def left_outside(
    plan: Plan, graph: Graph, transient: Sequence[int], options: PlanOptions, *, saved: bool
) -> Plan | None:
    """Return a plan of the same order with results outside the arena, or None if all stay in it.

    They are those of `no_more_than_eager`, whose arguments these are; and, on an accelerator, those that kernels return
    in fresh memory, where their copies in the arena save nothing.
    """
    found = no_more_than_eager(plan, graph, transient, options, saved=saved)
    made = found or plan
    on_host = not any(is_pinned(s.device) for s in graph.storages if s.planned)
    if on_host or made.eviction is not None or made.collectives or made.redzone:
        return found
    return plan_without_copies(made, options, saved=saved) or found


def as_after_a_trial(plan: Plan, options: PlanOptions) -> Plan:
    """Return the plan that a trial run on a device would leave, as far as what kernels allocate is known before it.

    What kernels return leaves the arena as in `left_outside`.
    """
    if plan.eviction is not None or plan.collectives or options.has_budget:
        return plan
    return left_outside(plan, plan.graph, plan.transient, options, saved=True) or plan


def _is_away(plan: Plan) -> bool:
    """Return whether a step runs on another device than its caller's."""
    return plan.eviction is not None and bool(plan.eviction.device)


def _one_by_one(plan: Plan) -> Plan:
    """Return the plan as if collectives had their results when they return: what they copy meanwhile is eager's too."""
    ops = tuple(replace(op, starts=False) if op.starts else op for op in plan.graph.ops)
    return replace(plan, graph=replace(plan.graph, ops=ops)) if ops != plan.graph.ops else plan


def _placed(graph: Graph) -> Graph:
    """Return the graph of a step on another device than its caller's, with results where their kernels write them: in
    the arena, from which they are copied to the caller."""
    results = (StorageKind.OUTPUT, StorageKind.GRADIENT)
    return replace(graph, storages=tuple(replace(s, planned=s.planned or s.kind in results) for s in graph.storages))
