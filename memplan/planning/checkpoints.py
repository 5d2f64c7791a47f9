"""Makes the plan of a step that follows the user's activation checkpoints: it keeps no more than eager keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule, make_schedule
from memplan.evict.costs import CostModel
from memplan.evict.graph.apply import Applied, apply
from memplan.evict.graph.equivalent import require_equivalent
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.workload import Workload, in_order
from memplan.planning.budget import cost_model, eviction_of
from memplan.planning.fit import Fitted, make_workload
from memplan.planning.make_plan import make_plan
from memplan.schedule import Policy, order
from memplan.solvers import Solver


def has_checkpoints(graph: Graph) -> bool:
    """Return whether the user checkpointed a part of the model."""
    return any(op.checkpoint for op in graph.ops)


def plan_checkpointed(
    *,
    model: str,
    graph: Graph,
    schedule: Schedule,
    alignment: int,
    versions: Mapping[str, str],
    costs: CostModel | str,
    reorder: str | Policy = "auto",
    redzone: int = 0,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Plan:
    """Return the plan of a scheduled graph in which what checkpoints drop is computed again.

    The recomputing ops are inserted where eager runs them; then the whole step is ordered once more by the policy
    `reorder`, and the better of the two orders is taken. `alignment` and `redzone` are in bytes, `time_limit` in
    seconds.
    """
    workload = make_workload(graph, schedule.order, cost_model(costs), alignment)
    events = checkpoint(workload)
    applied = apply(workload, events)
    found = make_schedule(applied.graph, tuple(range(len(applied.graph.ops))), "checkpoint")
    better = order(applied.graph, reorder)
    if better.max_live < found.max_live:
        applied = _reordered(applied, better)
        found = replace(better, order=tuple(range(len(better.order))), policy=f"checkpoint + {better.policy}")
    require_equivalent(graph, applied.graph, applied.sources)
    plan = make_plan(
        model=model,
        graph=applied.graph,
        schedule=found,
        alignment=alignment,
        versions=versions,
        redzone=redzone,
        solver=solver,
        time_limit=time_limit,
    )
    return replace(plan, eviction=eviction_of(_fitted(workload, applied, events), plan, "checkpoint", workload.within(plan.arena_size)))


def _reordered(applied: Applied, schedule: Schedule) -> Applied:
    """Return the same graph with its ops in the order of `schedule`."""
    return replace(
        applied,
        graph=in_order(applied.graph, schedule.order),
        sources=tuple(applied.sources[i] for i in schedule.order),
    )


def _fitted(workload: Workload, applied: Applied, events: object) -> Fitted:
    return Fitted(
        graph=applied.graph,
        sources=applied.sources,
        instances=applied.instances,
        measured=measure(workload, events),
        base=measure(workload, workload.plain),
    )
