"""Makes the plan of a step with the user's activation checkpoints: it keeps no more than eager keeps."""

from __future__ import annotations

from dataclasses import replace

from memplan.core.graph import Graph
from memplan.core.graph_edit import in_order
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import CostModel
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.rng_states import only_used, with_saved_states
from memplan.planning.budget import plan_within
from memplan.planning.fit import Fitted, make_workload
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.planning.planner import eviction_of
from memplan.schedule import order, proven


def has_checkpoints(graph: Graph) -> bool:
    """Return whether `torch.utils.checkpoint` is around a part of the model whose backward is in the graph."""
    return any(op.checkpoint for op in graph.ops)


def without_checkpoints(graph: Graph) -> Graph:
    """Return a graph in which no checkpoint drops a result."""
    return replace(graph, ops=tuple(replace(op, checkpoint=0, within=()) if op.checkpoint else op for op in graph.ops))


def plan_checkpointed(scheduled: ScheduledGraph, options: PlanOptions, costs: CostModel) -> Plan:
    """Return the plan of a scheduled graph in which what checkpoints drop is computed again.

    The recomputing ops are inserted where eager runs them. Then the whole step, with them, is ordered once more by
    `options.schedule`, and the order that needs less is taken. `costs` predict the seconds of the step.
    """
    workload = make_workload(scheduled.graph, scheduled.schedule.order, costs, scheduled.alignment)
    base = measure(workload, workload.plain)
    states = with_saved_states(workload)
    workload, events = only_used(states, checkpoint(states.workload))
    applied = apply(workload, events)
    followed = proven(applied.graph, "checkpoint")
    reordered = order(applied.graph, options.schedule)
    if reordered.max_live < followed.max_live:
        applied = _in_order(applied, reordered.order)
        followed = replace(reordered, order=followed.order, policy=f"{reordered.policy} + checkpoint")
    require_equivalent(scheduled.graph, applied.graph, applied.sources)
    plan = make_plan(replace(scheduled, graph=applied.graph, schedule=followed), options)
    fitted = Fitted(
        graph=applied.graph,
        sources=applied.sources,
        instances=applied.instances,
        measured=measure(workload, events),
        base=base,
    )
    return replace(plan, eviction=eviction_of(fitted, plan, "checkpoint", workload.within(plan.arena_size)))


def plan_from_checkpoints(scheduled: ScheduledGraph, options: PlanOptions, costs: CostModel) -> Plan:
    """Return the plan that `options.policy` makes within the arena of the step that follows the checkpoints.

    The plan that follows them is returned where the policy finds none that is at least as fast, by `costs`.
    """
    followed = plan_checkpointed(scheduled, options, costs)
    budget = followed.arena_size
    if scheduled.redzone:  # red zones do not count
        budget = plan_checkpointed(replace(scheduled, redzone=0), options, costs).arena_size
    try:
        found = plan_within(scheduled, replace(options, arena_budget=budget), costs)
    except BudgetInfeasible:
        return followed
    assert found.eviction is not None
    assert followed.eviction is not None
    return found if found.eviction.seconds <= followed.eviction.seconds else followed


def _in_order(applied: Applied, order: tuple[int, ...]) -> Applied:
    """Return the same graph with its ops in another order."""
    return replace(applied, graph=in_order(applied.graph, order), sources=tuple(applied.sources[i] for i in order))
