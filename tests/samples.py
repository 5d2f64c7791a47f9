"""One plan written by hand, whose every figure can be counted on fingers."""

from __future__ import annotations

import dataclasses

from memplan.core.graph import Graph, Origin, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.evict.costs import DEVICES
from memplan.planning.budget import plan_within
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.schedule import order, traced
from tests.graph_strategies import GraphBuilder


def sample_graph() -> Graph:
    """x(40), w(100) -> a(100) -> b(60, no out= kernel) -> y(8, the caller's); backward: d(100) -> gw(100)."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 40, planned=False)
    w = b.storage(StorageKind.PARAMETER, 100, planned=False)
    first = Origin(module="h.0.attn", source="model.py:12", op="aten.mm", node="mm")
    second = Origin(module="layers[1].norm", source="model.py:15", op="aten.native_layer_norm", node="norm")
    a = b.storage(StorageKind.ACTIVATION, 100, planned=True, origin=first)
    b.op(Phase.FORWARD, (x, w), (a,), target="aten.mm", origin=first)
    norm = b.storage(StorageKind.ACTIVATION, 60, planned=True, origin=second)
    b.op(Phase.FORWARD, (a,), (norm,), direct=False, target="aten.native_layer_norm", origin=second)
    y = b.storage(StorageKind.OUTPUT, 8, planned=False)
    b.op(Phase.FORWARD, (norm,), (y,), target="aten.sum")
    d = b.storage(StorageKind.ACTIVATION, 100, planned=True, origin=Origin(op="aten.expand"))
    b.op(Phase.BACKWARD, (norm,), (d,), target="aten.expand")
    gw = b.storage(StorageKind.GRADIENT, 100, planned=False)
    b.op(Phase.BACKWARD, (a, d), (gw,), target="aten.mm")
    return b.graph((y,), (gw,))


def sample_plan(alignment: int = 64, temporaries: tuple[int, ...] | None = None) -> Plan:
    """The sample graph in traced order; at alignment 1: max live 260 at step 3, arena 260."""
    graph = sample_graph()
    plan = make_plan(
        ScheduledGraph(
            model="sample", graph=graph, schedule=traced(graph), alignment=alignment, versions={"memplan": "0.1.0"}
        )
    )
    return dataclasses.replace(plan, temporaries=temporaries)


def branching_graph() -> Graph:
    """a(40) -> d(50), and a -> b(100) -> c(10); c and d -> y(8, the caller's). d had better come after b."""
    b = GraphBuilder()
    first, side, large, small = (b.storage(StorageKind.ACTIVATION, n, planned=True) for n in (40, 50, 100, 10))
    y = b.storage(StorageKind.OUTPUT, 8, planned=False)
    for reads, write in (((), first), ((first,), side), ((first,), large), ((large,), small), ((small, side), y)):
        b.op(Phase.FORWARD, reads, (write,))
    return b.graph((y,))


def branching_plan(policy: str) -> Plan:
    """The branching graph ordered by a policy: traced 190 bytes, optimal 150."""
    graph = branching_graph()
    schedule = order(graph, policy)
    return make_plan(
        ScheduledGraph(model="branching", graph=graph, schedule=schedule, alignment=1, versions={"memplan": "0.1.0"})
    )


MIB = 1 << 20


def deep_graph(length: int = 6) -> Graph:
    """block_a makes 1 MiB of the input, block_b of that, and so on; the backward reads them in reverse."""
    b = GraphBuilder()
    saved = [b.storage(StorageKind.INPUT, MIB, planned=False)]
    places = [Origin(module=f"block_{letter}", source=f"model.py:{i}") for i, letter in enumerate("abcdefgh"[:length])]
    for place in places:
        saved.append(b.storage(StorageKind.ACTIVATION, MIB, planned=True, origin=place))
        b.op(Phase.FORWARD, (saved[-2],), (saved[-1],), target="aten.mm.default", origin=place)
    gradient = saved[-1]
    for place, layer in zip(reversed(places), reversed(saved[1:]), strict=True):
        made = b.storage(StorageKind.GRADIENT, MIB, planned=True, origin=place)
        b.op(Phase.BACKWARD, (gradient, layer), (made,), target="aten.mm.default", origin=place)
        gradient = made
    kept = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.BACKWARD, (gradient,), (kept,), target="aten.sum.default")
    return b.graph(gradients=(kept,))


def deep_plan(policy: str | None = None, budget: int = 5 * MIB) -> Plan:
    """The deep graph, which needs 7 MiB; with a policy, kept below `budget` by it."""
    graph = deep_graph()
    schedule = traced(graph)
    scheduled = ScheduledGraph(model="deep", graph=graph, schedule=schedule, alignment=64, versions={})
    if policy is None:
        return make_plan(scheduled)
    return plan_within(scheduled, PlanOptions(arena_budget=budget, policy=policy), DEVICES["a100"])
