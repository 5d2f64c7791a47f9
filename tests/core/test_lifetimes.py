from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import placed
from memplan.core.problem import Interval
from memplan.core.schedule import live_bytes
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, graphs, schedules
from tests.samples import sample_graph


@given(st.data())
def test_max_live_is_the_schedules_when_nothing_is_aligned(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    problem = lifetimes.problem(graph, schedule, alignment=1)
    assert problem.max_live == schedule.max_live
    profile = live_bytes(graph, schedule.order)
    for step in range(len(profile)):
        assert sum(b.size for b in problem.alive_at(step)) == profile[step]


@given(st.data(), st.sampled_from([1, 8, 64, 512]), st.integers(0, 2))
def test_sizes_are_aligned_and_hold_their_bytes(data: st.DataObject, alignment: int, redzones: int) -> None:
    graph = data.draw(graphs())
    problem = lifetimes.problem(graph, traced(graph), alignment=alignment, redzone=redzones * alignment)
    nbytes = {storage.name: storage.nbytes for storage in graph.storages}
    for buffer in problem.buffers:
        assert buffer.size % alignment == 0
        assert buffer.alignment == alignment
        assert 0 <= buffer.size - nbytes[buffer.id] - 2 * redzones * alignment < alignment


@given(graphs())
def test_every_planned_storage_that_is_used_is_a_buffer(graph: Graph) -> None:
    lies = placed(graph, range(len(graph.ops)))
    used = {s for op in graph.ops for s in lies.touched(op)}
    planned = [s.name for i, s in enumerate(graph.storages) if s.planned and s.nbytes and i in used]
    problem = lifetimes.problem(graph, traced(graph), alignment=8)
    assert sorted(b.id for b in problem.buffers) == sorted(planned)
    births = [b.live.start for b in problem.buffers]
    assert births == sorted(births)


def test_a_lifetime_ends_after_the_last_use() -> None:
    graph = sample_graph()
    problem = lifetimes.problem(graph, traced(graph), alignment=1)
    assert [(b.id, b.live) for b in problem.buffers] == [
        ("activation_2", Interval(0, 5)),
        ("activation_3", Interval(1, 4)),
        ("activation_5", Interval(3, 5)),
    ]
    assert problem.buffers[0].origin == "h.0.attn"
    assert problem.buffers[2].origin == "aten.expand"


def test_copies_on_the_host_are_placed_without_red_zones() -> None:
    """Nothing else: what is planned lies in the arena, and what the caller holds on the host is the caller's."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 40, planned=False)
    made = b.storage(StorageKind.ACTIVATION, 40, planned=True)
    host = b.storage(StorageKind.HOST, 40, planned=False)
    b.op(Phase.FORWARD, (x,), (made,))
    b.op(Phase.FORWARD, (made,), (host,))
    b.op(Phase.FORWARD, (host,), (b.storage(StorageKind.OUTPUT, 8, planned=False),))
    graph = b.graph((3,))
    found = lifetimes.host_problem(graph, traced(graph), alignment=64)
    assert [(buffer.id, buffer.size, buffer.alignment, buffer.live) for buffer in found.buffers] == [
        ("host copy_2", 64, 64, Interval(1, 3))
    ]
    guarded = lifetimes.problem(graph, traced(graph), alignment=64, redzone=64)
    assert [(buffer.id, buffer.size) for buffer in guarded.buffers] == [("activation_1", 64 + 2 * 64)]


def test_each_of_several_devices_has_the_buffers_that_lie_there() -> None:
    b = GraphBuilder()
    made = [b.storage(StorageKind.ACTIVATION, 8 * (i + 1), planned=True) for i in range(4)]
    for i, value in enumerate(made):
        b.op(Phase.FORWARD, tuple(made[:i]), (value,))
    graph = b.graph()
    places = ("cuda:1", "cpu", "cuda:0", "cuda:1")
    graph = replace(graph, storages=tuple(replace(s, device=d) for s, d in zip(graph.storages, places, strict=True)))
    whole = lifetimes.problem(graph, traced(graph), alignment=8)
    for device in ("cpu", "cuda:0", "cuda:1", "cuda:2"):
        part = lifetimes.device_problem(whole, graph, device)
        assert part.capacity is None
        assert [buffer.size for buffer in part.buffers] == [8 * (i + 1) for i, d in enumerate(places) if d == device]


def test_storages_without_bytes_are_no_buffers_and_kinds_are_kept() -> None:
    b = GraphBuilder()
    made = b.storage(StorageKind.ACTIVATION, 1, planned=True)
    empty = b.storage(StorageKind.ACTIVATION, 0, planned=True)
    b.op(Phase.FORWARD, (), (made, empty))
    found = lifetimes.problem(b.graph(), traced(b.graph()), alignment=4, redzone=8).buffers
    assert [(buffer.id, buffer.size, buffer.kind, buffer.alignment) for buffer in found] == [
        ("activation_0", 4 + 2 * 8, "activation", 4)
    ]
