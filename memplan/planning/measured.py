"""Adds what kernels were measured to allocate to a plan that was made without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.totals import beside_results
from memplan.planning.eager_total import eager_total
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import plan_partly_outside


def with_temporaries(plan: Plan, graph: Graph, transient: Sequence[int], options: PlanOptions) -> Plan:
    """Return a plan without a budget with the bytes that its kernels allocate, and with results outside the arena where
    it would need more than eager, as `memplan.compile` puts them there.

    Args:
        plan: The plan of a step, which may follow activation checkpoints.
        graph: The step as it was traced.
        transient: The bytes that each op of `graph` allocates outside the arena.
        options: Those that the plan was made with.
    """
    if plan.eviction is not None:
        return replace(plan, temporaries=tuple(0 if s < 0 else transient[s] for s in plan.eviction.sources))
    plan = replace(plan, temporaries=tuple(transient))
    beside = beside_results(graph, transient)
    limit = eager_total(graph, beside) + plan.padding
    if plan.on_device <= limit:
        return plan
    gradients = options.gradients == "auto"
    return plan_partly_outside(plan, beside, limit, options, gradients=gradients, saved=True) or plan
