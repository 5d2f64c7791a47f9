"""What events may do, on steps of a few ops: each rule where it was once broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.errors import InvalidEviction
from memplan.evict.apply import apply
from memplan.evict.search import Decisions, DecisionSearch
from memplan.evict.search_kernel import TO_HOST
from memplan.evict.workload import Event, Kind, Workload, limits, with_host_resident_kept
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder


def _events(text: str) -> tuple[Event, ...]:
    """ "run 0, drop 1" as events."""
    pairs = (word.split() for word in text.split(", "))
    return tuple(Event(Kind[kind.upper()], int(of)) for kind, of in pairs)


def _changed() -> Graph:
    """s is made, read for y, and changed; y is read twice."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    s, y = (b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(2))
    one, two = (b.storage(StorageKind.OUTPUT, 64, planned=False) for _ in range(2))
    for reads, writes in (((x,), (s,)), ((s,), (y,)), ((x, s), (s,)), ((y,), (one,)), ((y, s), (two,))):
        b.op(Phase.FORWARD, reads, writes)
    return b.graph((one, two))


def test_what_is_made_from_bytes_that_change_cannot_be_made_again_after_that() -> None:
    graph = _changed()
    workload = workload_of(graph)
    assert workload.redo_until[2] == 2
    assert limits(workload)[2] == 2
    with pytest.raises(InvalidEviction, match="does not find"):
        judged(graph, workload, _events("run 0, run 1, run 2, run 3, drop 2, run 1, run 4"))


def _pair(*, random: bool = False) -> Graph:
    """One op makes two activations; another reads them, a third reads the second again."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    s, y = b.storage(StorageKind.ACTIVATION, 64, planned=True), b.storage(StorageKind.ACTIVATION, 32, planned=True)
    one, two = (b.storage(StorageKind.OUTPUT, 64, planned=False) for _ in range(2))
    b.op(Phase.FORWARD, (x,), (s, y), random=random)
    b.op(Phase.FORWARD, (y, s), (one,))
    b.op(Phase.FORWARD, (s,), (two,))
    return b.graph((one, two))


def test_an_op_runs_again_while_one_of_its_results_comes_back_from_the_host() -> None:
    graph = _pair()
    text = (
        "run 0, offload 1, offloaded 1, reload 1, reloaded 1, drop 1, drop 2, reload 1, run 0, reloaded 1, run 1, run 2"
    )
    _, figures = judged(graph, workload_of(graph), _events(text))
    assert figures.peak == 64 + 64 + 32  # a reload's bytes, and a throw-away result's


def test_what_the_host_has_too_is_dropped_without_a_copy() -> None:
    graph = _pair(random=True)  # nothing can be made again
    workload = workload_of(graph)
    swapped = "run 0, offload 1, offloaded 1, reload 1, reloaded 1, run 1, drop 1, reload 1, reloaded 1, run 2"
    applied, _ = judged(graph, workload, _events(swapped))
    assert sum(op.target == "memplan.offload" for op in applied.graph.ops) == 1
    with pytest.raises(InvalidEviction, match="cannot be had again"):
        apply(workload, _events("run 0, drop 1"))


def test_what_was_changed_since_its_copy_is_not_dropped() -> None:
    workload = workload_of(_changed())
    with pytest.raises(InvalidEviction, match="cannot be had again"):
        apply(workload, _events("run 0, offload 1, offloaded 1, reload 1, reloaded 1, run 1, run 2, drop 1"))


def test_decisions_that_cannot_be_make_no_events() -> None:
    search = DecisionSearch(workload_of(_pair(random=True), budget=1000))
    none = np.zeros(5, np.int64)
    assert search.judged(none + TO_HOST, none - 1).area == 0.0  # nowhere to act: everything is kept
    lost = Decisions(none + 1, np.array([-1, 0, 0, -1, -1]), 0.0, 0.0, 0)
    assert search.judged(lost.decision, lost.gap).area == float("inf")
    with pytest.raises(InvalidEviction, match="under these decisions"):
        search.events(lost)


def test_a_policy_that_moves_nothing_sees_what_streamed_storages_leave() -> None:
    graph = _pair()
    workload = replace(workload_of(graph, host_resident=True), budget=1000)
    seen: list[Workload] = []

    def plain(inner: Workload) -> tuple[Event, ...]:
        seen.append(inner)
        return inner.plain

    assert judged(graph, workload, with_host_resident_kept(workload, plain))[1].peak == 64 + 64 + 32 + 32
    assert (seen[0].budget, seen[0].host_resident) == (1000 - 3 * 64, frozenset())
