"""One plan written by hand, whose every figure can be counted on fingers."""

from __future__ import annotations

import dataclasses

from memplan.graph import Graph, Origin, Phase, StorageKind
from memplan.plan import Plan, make_plan
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
        model="sample", graph=graph, schedule=traced(graph), alignment=alignment, versions={"memplan": "0.1.0"}
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
    return make_plan(model="branching", graph=graph, schedule=schedule, alignment=1, versions={"memplan": "0.1.0"})
