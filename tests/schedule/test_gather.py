"""Gathering keeps an order legal, deterministic and as small as it was, and brings ops of a kind together."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.legal_orders import require_legal
from memplan.core.schedule import live_bytes
from memplan.schedule import traced
from memplan.schedule.group_updates import gather
from tests.graph_strategies import GraphBuilder, graphs, schedules


@given(st.data())
def test_never_larger_and_always_legal(data: st.DataObject) -> None:
    graph = data.draw(graphs(max_ops=8))
    before = data.draw(schedules(graph))
    kinds = data.draw(st.dictionaries(st.integers(0, len(graph.ops)), st.sampled_from("ab")))
    alignment = data.draw(st.sampled_from([1, 16]))
    after = gather(graph, before, kinds, alignment)
    require_legal(graph, after.order)
    assert after == gather(graph, before, kinds, alignment)
    assert (after.bound, after.evidence, after.proof) == (before.bound, before.evidence, before.proof)
    assert after.max_live == max(live_bytes(graph, after.order), default=0) <= before.max_live
    problems = [lifetimes.problem(graph, s, alignment=alignment) for s in (before, after)]
    assert problems[1].max_live <= problems[0].max_live
    others = [[i for i in s.order if i not in kinds] for s in (before, after)]
    assert others[0] == others[1]


def test_what_makes_bytes_does_not_wait() -> None:
    """Side by side with its kind, it would hold its bytes beside those that an op of another kind waits with."""
    b = GraphBuilder()
    small, large, made = (b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for nbytes in (1, 64, 64))
    b.op(Phase.BACKWARD, (), (small, large))
    b.op(Phase.BACKWARD, (small,), ())
    b.op(Phase.BACKWARD, (large,), ())
    b.op(Phase.BACKWARD, (), (made,))
    graph = b.graph()
    after = gather(graph, traced(graph), {1: "a", 2: "b", 3: "a"}, 1)
    assert after.max_live == max(live_bytes(graph, after.order)) == 65


def _step(peak: int, *, gradients: int = 6) -> Graph:
    """A backward of `gradients` layers: an activation, a gradient of 8 bytes, its update; one activation of `peak`."""
    b = GraphBuilder()
    carried = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    b.op(Phase.FORWARD, (), (carried,))
    for layer in range(gradients):
        parameter = b.storage(StorageKind.PARAMETER, 8, planned=False)
        following = b.storage(StorageKind.ACTIVATION, peak if layer == gradients // 2 else 64, planned=True)
        gradient = b.storage(StorageKind.GRADIENT, 8, planned=True)
        b.op(Phase.BACKWARD, (carried,), (gradient,))
        b.op(Phase.BACKWARD, (gradient, parameter), (parameter,), target="update")
        b.op(Phase.BACKWARD, (carried, parameter), (following,))
        carried = following
    return b.graph()


def _runs(graph: Graph, order: tuple[int, ...]) -> list[int]:
    """Lengths of the runs of updates in an order."""
    updates = [graph.ops[i].target == "update" for i in order]
    return [len(list(run)) for update, run in groupby(updates) if update]


def test_updates_wait_where_there_is_room() -> None:
    graph = _free(_step(1024))
    kinds = {i: "update" for i, op in enumerate(graph.ops) if op.target == "update"}
    order = gather(graph, traced(graph), kinds, 1).order
    assert _runs(graph, order) == [4, 1, 1], "before the large activation is made, before it is used last, after it"
    apart = gather(graph, traced(graph), {i: i for i in kinds}, 1).order
    assert sorted(apart) == sorted(order)
    flat = _free(_step(64))
    assert _runs(flat, gather(flat, traced(flat), kinds, 1).order) == [1] * 6, "no room: each gradient is the peak"


def test_what_needs_an_update_makes_it_run() -> None:
    graph = _step(1024)
    kinds = {i: "update" for i, op in enumerate(graph.ops) if op.target == "update"}
    assert gather(graph, traced(graph), kinds, 1) == traced(graph), "the op behind each update reads the parameter"


def _free(graph: Graph) -> Graph:
    """Without what reads a parameter that an update has written."""

    def reads(op: int) -> tuple[int, ...]:
        values = graph.ops[op].reads
        if graph.ops[op].target == "update":
            return values
        return tuple(v for v in values if graph.storages[graph.values[v].storage].planned)

    return replace(graph, ops=tuple(replace(op, reads=reads(i)) for i, op in enumerate(graph.ops)))


def test_what_waits_in_the_forward_runs_before_the_backward() -> None:
    """There is room for its gradient later too, but the caller's loss is computed in between."""
    b = GraphBuilder()
    gradient, large, other, huge = (b.storage(StorageKind.ACTIVATION, n, planned=True) for n in (8, 64, 64, 256))
    b.op(Phase.FORWARD, (), (gradient,))
    b.op(Phase.FORWARD, (gradient,), ())
    b.op(Phase.FORWARD, (), (large,))
    b.op(Phase.BACKWARD, (large,), (other,))
    b.op(Phase.BACKWARD, (other,), (huge,))
    graph = b.graph()
    assert gather(graph, traced(graph), {1: "update"}, 1).order == (0, 2, 1, 3, 4)
