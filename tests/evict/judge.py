"""How tests judge events: applied, held against the oracle, and measured twice (by events, and by the graph)."""

from __future__ import annotations

import pytest

from memplan.core import lifetimes
from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph
from memplan.core.graph_edit import in_order
from memplan.core.in_place import placed
from memplan.core.schedule import make_schedule
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import DEVICES, CostModel, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import MeasuredEvents, measure
from memplan.evict.workload import Events, Workload, host_resident_storages
from memplan.schedule import order


def workload_of(
    graph: Graph,
    *,
    budget: int = 0,
    alignment: int = 1,
    host_resident: bool = False,
    costs: CostModel = DEVICES["a100"],
) -> Workload:
    """The traced order of `graph` as a workload; `host_resident`: what the model and the caller hold is on the host."""
    schedule = order(graph, "traced")
    return Workload(
        graph=in_order(graph, schedule.order),
        sources=schedule.order,
        costs=costs,
        budget=budget,
        alignment=alignment,
        host_resident=host_resident_storages(graph) if host_resident else frozenset(),
    )


def judged(traced: Graph, workload: Workload, events: Events) -> tuple[Applied, MeasuredEvents]:
    """The applied graph and its figures, after everything that must hold of any events was found to hold."""
    applied = apply(workload, events)
    require_equivalent(traced, applied.graph, applied.sources)
    ids = tuple(range(len(applied.graph.ops)))
    require_equivalent(traced, placed(applied.graph, ids), applied.sources)
    found = measure(workload, events)
    schedule = make_schedule(applied.graph, ids, "evicted")
    problem = lifetimes.problem(applied.graph, schedule, alignment=workload.alignment)
    assert problem.max_live == found.peak
    costs, copies = workload.costs, [op for op in applied.graph.ops if op.target in TRANSFERS]
    kernels = sum(costs.op_seconds(applied.graph, op) for op in applied.graph.ops if op.target not in TRANSFERS)
    assert found.seconds == pytest.approx(
        kernels + costs.launch * len(copies) + found.stall, abs=1e-12
    )  # fewer copies take less
    assert simulate(applied.graph, costs) == pytest.approx((found.seconds, found.stall), abs=1e-12)
    return applied, found
