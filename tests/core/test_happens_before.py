"""The races of a plan's copies, against the transitive closure of the order that lanes, starts and waits make."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, TRANSFERS
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.happens_before import follow, require_no_races
from memplan.core.plan import Plan
from memplan.errors import InvalidPlan
from memplan.evict.graph.apply import apply
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.schedule import make_schedule
from tests.evict.judge import workload_of
from tests.graph_strategies import GraphBuilder, graphs
from tests.runtime.budgets import everything

SIZE = 256


def _plan(graph: Graph) -> Plan:
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "given")
    return make_plan(ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=64, versions={}))


def _races(plan: Plan, without: Collection[int], unordered: Collection[int]) -> set[tuple[str, str]]:
    """Pairs of ops of two steps that use the same bytes, one of them writing, with no path between them."""
    graph, order = plan.placed, plan.schedule.order
    before: nx.DiGraph = nx.DiGraph()
    lanes: dict[str, list[tuple[int, int]]] = {}
    compute: list[tuple[int, int]] = []
    flying: dict[tuple[int, int], tuple[int, int]] = {}
    waited: list[tuple[int, int]] = []  # nodes that the next compute node follows
    nodes: list[tuple[tuple[int, int], str]] = []
    for step in range(2):
        for position, index in enumerate(order):
            op, node = graph.ops[index], (step, position)
            if op.target in (OFFLOAD_WAIT, RELOAD_WAIT):
                pair = graph.values[op.reads[0]].storage, graph.values[op.reads[1]].storage
                if position not in without:
                    waited.append(flying[pair])
                continue
            before.add_node(node)
            if op.target in (OFFLOAD, RELOAD):
                lanes.setdefault(op.target, []).append(node)
                flying[graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage] = node
                if position not in unordered:
                    before.add_edges_from((other, node) for other in (*compute[-1:], *waited))
            else:
                before.add_edges_from((other, node) for other in waited)
                waited = []
                compute.append(node)
            nodes.append((node, op.name))
    for lane in (compute, *lanes.values()):
        before.add_edges_from(pairwise(lane))
    after = {node: nx.descendants(before, node) for node, _ in nodes}
    found = set()
    for k, (one, first) in enumerate(nodes):
        for two, second in nodes[k + 1 :]:
            if two not in after[one] and _conflict(plan, graph, order[one[1]], order[two[1]]):
                found.add((first, second))
    return found


def _conflict(plan: Plan, graph: Graph, one: int, two: int) -> bool:
    def uses(op: int) -> list[tuple[str, int, int, bool]]:
        found = []
        for values, writes in ((graph.ops[op].reads, False), (graph.ops[op].writes, True)):
            for value in values:
                s = graph.storages[graph.values[value].storage]
                low = plan.solution.offsets.get(s.name, 0)
                size = -(-s.nbytes // 64) * 64
                found.append(("arena" if s.name in plan.solution.offsets else s.name, low, low + size, writes))
        return found

    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[3] or b[3]) for a in uses(one) for b in uses(two))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_races_are_those_of_the_transitive_closure(data: st.DataObject) -> None:
    workload = workload_of(data.draw(graphs(max_ops=10)))
    plan = _plan(apply(workload, everything(workload)).graph)
    assert not _races(plan, (), ())
    assert not follow(plan).races
    targets = [plan.graph.ops[index].target for index in plan.schedule.order]
    waits = [p for p, target in enumerate(targets) if target in (OFFLOAD_WAIT, RELOAD_WAIT)]
    starts = [p for p, target in enumerate(targets) if target in (OFFLOAD, RELOAD)]
    without = data.draw(st.sets(st.sampled_from(waits))) if waits else set()
    unordered = data.draw(st.sets(st.sampled_from(starts))) if starts else set()
    found = follow(plan, without=without, unordered=unordered).races
    assert {(r.first, r.second) for r in found} == _races(plan, without, unordered)


def _offloaded(*, in_order: bool = True) -> Plan:
    """One storage goes to the host and back, while another takes its bytes."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    one, two, back = (b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(3))
    host = b.storage(StorageKind.HOST, SIZE, planned=False)
    out = b.storage(StorageKind.OUTPUT, SIZE, planned=False)
    b.op(Phase.FORWARD, (x,), (one,))
    b.op(Phase.FORWARD, (one,), (host,), target=OFFLOAD)
    b.op(Phase.FORWARD, (one, host), (host,), target=OFFLOAD_WAIT)
    b.op(Phase.FORWARD, (x,), (two,))
    b.op(Phase.FORWARD, (two,), (out,))
    b.op(Phase.FORWARD, (host,), (back,), target=RELOAD)
    b.op(Phase.FORWARD, (host, back), (back,), target=RELOAD_WAIT)
    b.op(Phase.FORWARD, (back,), (out,))
    graph = b.graph(outputs=(out,))
    if not in_order:
        ops = graph.ops
        graph = replace(graph, ops=(*ops[:2], ops[3], ops[2], *ops[4:]))
    return _plan(graph)


def test_bytes_that_are_given_to_another_storage_before_a_copy_has_left_them_are_a_race() -> None:
    """The buffers `one` and `two` are not alive together by use, but the copy of `one` is still under way."""
    require_no_races(_offloaded())
    plan = _offloaded()
    offsets = dict(plan.solution.offsets)
    assert offsets["activation_1"] == offsets["activation_2"], "the case needs shared bytes"
    moved = replace(plan, schedule=replace(plan.schedule, order=(0, 1, 3, 2, 4, 5, 6, 7)))
    with pytest.raises(InvalidPlan, match=r"op1 and op3 use bytes \[0, 256\) of the arena of cpu in any order"):
        require_no_races(moved)


def test_a_wait_behind_a_later_copy_of_its_lane_is_idle() -> None:
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    one, two = (b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(2))
    hosts = [b.storage(StorageKind.HOST, SIZE, planned=False) for _ in range(2)]
    out = b.storage(StorageKind.OUTPUT, SIZE, planned=False)
    b.op(Phase.FORWARD, (x,), (one,))
    b.op(Phase.FORWARD, (x,), (two,))
    for source, host in zip((one, two), hosts, strict=True):
        b.op(Phase.FORWARD, (source,), (host,), target=OFFLOAD)
    for source, host in ((two, hosts[1]), (one, hosts[0])):
        b.op(Phase.FORWARD, (source, host), (host,), target=OFFLOAD_WAIT)
    b.op(Phase.FORWARD, (x,), (out,))
    plan = _plan(b.graph(outputs=(out,)))
    found = follow(plan)
    assert (found.copies, found.idle_waits, found.races) == (2, (5,), ())
    assert not follow(plan, without={5}).races
    assert follow(plan, without={4, 5}).races


def test_plans_without_copies_need_no_check() -> None:
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    out = b.storage(StorageKind.OUTPUT, SIZE, planned=False)
    b.op(Phase.FORWARD, (x,), (out,))
    plan = _plan(b.graph(outputs=(out,)))
    require_no_races(plan)
    assert follow(plan).copies == 0
    assert not any(op.target in TRANSFERS for op in plan.graph.ops)
