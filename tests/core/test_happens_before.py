"""The races of a plan's copies, against the transitive closure of the order that lanes, starts and waits make."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, SEND, TRANSFERS
from memplan.core.graph import Graph, Op, Phase, Storage, StorageKind
from memplan.core.happens_before import CALLER, follow, require_no_races
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.errors import InvalidPlan
from memplan.evict.apply import apply
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.planning.divide import devices_of, divide
from memplan.planning.make_plan import ScheduledGraph, make_plan
from tests.evict.judge import workload_of
from tests.graph_strategies import GraphBuilder, graphs
from tests.runtime.budgets import everything

SIZE = 256
STARTS = (OFFLOAD, RELOAD, SEND)
DEVICES = ("late:0", "late:1", "late:2")


def _plan(graph: Graph) -> Plan:
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "given")
    return make_plan(ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=64, versions={}))


_Used = list[tuple[int, bool]]  # storages, and whether they are written


class _LeftOut(NamedTuple):
    """Parts of a plan that `follow` leaves out."""

    without: Collection[int] = ()
    unordered: Collection[int] = ()
    unturned: Collection[int] = ()
    unsettled: Collection[int] = ()


class _Order:
    """The nodes of two steps, an edge from each to what runs after it for sure."""

    def __init__(self, plan: Plan, left_out: _LeftOut) -> None:
        self.graph, self.left_out = plan.placed, left_out
        self.devices = {s.device for s in self.graph.storages if s.name in plan.solution.offsets}
        self.callers = [
            i for i, s in enumerate(self.graph.storages) if not s.planned and s.kind is not StorageKind.HOST
        ]
        copied = {s for op in self.graph.ops if op.target in STARTS for s in self.graph.touched(op)}
        self.away = any(self.graph.storages[s].device not in self.devices for s in copied.intersection(self.callers))
        self.before: nx.DiGraph = nx.DiGraph()
        self.lanes: dict[object, list[object]] = {device: [] for device in self.devices}
        self.copies: set[object] = set()
        self.host: object = None  # the last node that the host waited for: all later nodes are after it
        self.flying: dict[tuple[int, int], object] = {}
        self.uses: list[tuple[object, str, list[tuple[int, bool]]]] = []
        ops = [self.graph.ops[index] for index in plan.schedule.order]
        phases = {op.phase for op in ops}
        for number, phase in enumerate((Phase.FORWARD, Phase.BACKWARD) * 2):
            if phase is Phase.BACKWARD and phase not in phases:
                continue
            self.turn(number)
            for position, op in enumerate(ops):
                if op.phase is phase:
                    self.step(op, (number, position))
            if self.away and number not in left_out.unsettled:
                self.wait_on_host((number, "settle"), [self.lanes[c][-1] for c in self.copies])
            self.give(number, last=phase is Phase.BACKWARD or Phase.BACKWARD not in phases)

    def add(self, lane: object, node: object) -> None:
        self.before.add_node(node)
        self.before.add_edges_from((last, node) for last in self.lanes.setdefault(lane, [])[-1:])
        if self.host is not None:
            self.before.add_edge(self.host, node)
        self.lanes[lane].append(node)

    def wait_on_host(self, node: object, after: Iterable[object]) -> None:
        self.before.add_node(node)
        self.before.add_edges_from((one, node) for one in after)
        if self.host is not None:
            self.before.add_edge(self.host, node)
        self.host = node

    def turn(self, number: int) -> None:
        for device in self.devices:
            if number in self.left_out.unturned:
                self.lanes[device] = []

    def step(self, op: Op, node: tuple[int, int]) -> None:
        if op.target not in TRANSFERS:
            self.run(op, node)
        elif op.target in STARTS:
            self.start(op, node)
        elif node[1] not in self.left_out.without:
            self.wait(op, node)

    def used(self, op: Op) -> _Used:
        reads = [(self.graph.values[v].storage, False) for v in op.reads]
        return reads + [(self.graph.values[v].storage, True) for v in op.writes]

    def run(self, op: Op, node: tuple[int, int]) -> None:
        touched = [self.graph.storages[s] for s in self.graph.touched(op)]
        arenas = [s.device for s in touched if s.planned and s.nbytes]
        lane = next(iter([*arenas, *(s.device for s in touched if s.device in self.devices)]), "")
        used = self.used(op)
        outside = [u for u in used if self.graph.storages[u[0]].device not in self.devices]
        if lane:
            self.add(lane, node)
            self.uses.append((node, op.name, [u for u in used if u not in outside]))
            last: list[object] = [node] if any(writes for _, writes in outside) else []  # it is complete by then
        else:  # on the host, between what it launched before and after
            last = [self.lanes[d][-1] for d in self.devices if self.lanes[d]]
        if outside:
            self.wait_on_host((*node, "host"), last)
            self.uses.append(((*node, "host"), op.name, outside))

    def ends(self, source: int, destination: int) -> tuple[tuple[int, int], list[str]]:
        pair = self.graph.values[source].storage, self.graph.values[destination].storage
        storages = [self.graph.storages[s] for s in pair if self.graph.storages[s].kind is not StorageKind.HOST]
        return pair, [s.device for s in storages if s.device in self.devices]

    def start(self, op: Op, node: tuple[int, int]) -> None:
        pair, here = self.ends(op.reads[0], op.writes[0])
        lane = (op.target, *here)
        self.add(lane, node)
        self.copies.add(lane)
        if node[1] not in self.left_out.unordered:
            self.before.add_edges_from((self.lanes[d][-1], node) for d in here if self.lanes[d])
        self.flying[pair] = node
        self.uses.append((node, op.name, self.used(op)))

    def wait(self, op: Op, node: tuple[int, int]) -> None:
        pair, _ = self.ends(*op.reads)
        for device in self.devices:
            self.before.add_edge(self.flying[pair], (*node, device))
            self.add(device, (*node, device))

    def give(self, number: int, *, last: bool) -> None:
        """The caller reads results; at the end of a step, all that is not the plan's may be written, or freed."""
        results = self.graph.gradients if number % 2 else self.graph.outputs
        used = [(self.graph.values[v].storage, False) for v in results]
        tangents = [s for s in self.callers if self.graph.storages[s].kind is StorageKind.TANGENT]
        used += [(s, True) for s in (self.callers if last else tangents)]
        by_device = {d: [u for u in used if self.graph.storages[u[0]].device == d] for d in self.devices}
        for device in self.devices:
            self.add(device, (number, "caller", device))
            self.uses.append(((number, "caller", device), CALLER, by_device[device]))
        rest = [u for u in used if self.graph.storages[u[0]].device not in self.devices]
        self.wait_on_host((number, "caller"), ())
        self.uses.append(((number, "caller"), CALLER, rest))


def _races(plan: Plan, left_out: _LeftOut) -> set[tuple[str, str]]:
    """Pairs of ops of two steps that use the same bytes, one of them writing, with no path between them."""
    order = _Order(plan, left_out)
    found = set()
    for k, (one, name, first) in enumerate(order.uses):
        after = nx.descendants(order.before, one)
        for two, other, second in order.uses[k + 1 :]:
            if one != two and two not in after and _conflict(plan, order.graph, first, second):
                found.add((name, other))
    return found


def _conflict(plan: Plan, graph: Graph, one: _Used, two: _Used) -> bool:
    def places(used: _Used) -> list[tuple[str, int, int, bool]]:
        found = []
        for index, writes in used:
            s = graph.storages[index]
            low = plan.solution.offsets.get(s.name, 0)
            size = -(-s.nbytes // 64) * 64
            found.append((s.device if s.name in plan.solution.offsets else s.name, low, low + size, writes))
        return found

    pairs = itertools.product(places(one), places(two))
    return any(a[0] == b[0] and a[1] < b[2] and b[1] < a[2] and (a[3] or b[3]) for a, b in pairs)


@given(st.data())
def test_races_are_those_of_the_transitive_closure(data: st.DataObject) -> None:
    workload = workload_of(data.draw(graphs(max_ops=10)))
    _check(data, _plan(apply(workload, everything(workload)).graph))


@given(st.data())
def test_races_between_several_devices_too(data: st.DataObject) -> None:
    workload = replace(workload_of(data.draw(graphs(max_ops=8)), host_resident=True), device=DEVICES[0])
    workload = workload.within(measure(workload, workload.plain).peak)
    whole = apply(workload, flow(workload))
    wanted = [data.draw(st.integers(0, len(DEVICES) - 1)) for _ in whole.graph.ops]
    divided, _ = divide(whole.graph, whole.sources, devices_of(whole.graph, wanted), DEVICES)
    _check(data, _plan(divided))


def _check(data: st.DataObject, plan: Plan) -> None:
    assert not _races(plan, _LeftOut())
    assert not follow(plan).races
    targets = [plan.graph.ops[index].target for index in plan.schedule.order]
    waits = [p for p, target in enumerate(targets) if target in TRANSFERS and target not in STARTS]
    starts = [p for p, target in enumerate(targets) if target in STARTS]
    chosen = [data.draw(st.sets(st.sampled_from(of))) if of else set() for of in (waits, starts, range(4), range(4))]
    left_out = _LeftOut(*chosen)
    found = follow(plan, **left_out._asdict()).races
    assert {(r.first, r.second) for r in found} == _races(plan, left_out)


def offloaded(*, in_order: bool = True) -> Plan:
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
    require_no_races(offloaded())
    plan = offloaded()
    offsets = dict(plan.solution.offsets)
    assert offsets["activation_1"] == offsets["activation_2"], "the case needs shared bytes"
    moved = replace(plan, schedule=replace(plan.schedule, order=(0, 1, 3, 2, 4, 5, 6, 7)))
    with pytest.raises(InvalidPlan, match=r"op1 and op3 use bytes \[0, 256\) of the arena of cpu in any order"):
        require_no_races(moved)


def test_a_result_that_the_forward_leaves_on_the_host_is_ordered_by_its_device() -> None:
    """As `y.cpu()`: the op writes a tensor of the host, and reads an arena."""
    plan = offloaded()
    plan = _plan(replace(plan.graph, storages=_on_device(plan.graph)))
    assert {s.device for s in plan.graph.storages} == {"cpu", "late:0"}
    assert not follow(plan).races
    assert follow(plan, without={2}).races


@pytest.mark.parametrize(("target", "match"), [(OFFLOAD_WAIT, "is not a copy"), (RELOAD_WAIT, "is not a copy")])
def test_what_is_no_copy_is_named(target: str, match: str) -> None:
    plan = offloaded()
    ops = tuple(replace(op, target=target) if op.target in STARTS else op for op in plan.graph.ops)
    broken = replace(plan, graph=replace(plan.graph, ops=ops))
    with pytest.raises(InvalidPlan, match=match):
        require_no_races(broken)


def test_a_wait_without_a_start_is_named() -> None:
    plan = offloaded()
    moved = replace(plan, schedule=replace(plan.schedule, order=(0, 2, 1, 3, 4, 5, 6, 7)))
    with pytest.raises(InvalidPlan, match="op op2: waits for a copy that was not started"):
        require_no_races(moved)


def _on_device(graph: Graph) -> tuple[Storage, ...]:
    return tuple(replace(s, device="late:0") if s.planned else s for s in graph.storages)
