"""Capuchin: measure, then guide (row P5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.evict.costs import DEVICES, Link, signature_of
from memplan.evict.measure import measure
from memplan.evict.policies.capuchin import capuchin, gaps_of, recompute_seconds
from memplan.evict.workload import Kind, Workload
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder

_OP = 1.0  # seconds
_SIZE = 100  # bytes


def _chain(depth: int, *, bandwidth: float, slow: int = -1) -> tuple[Graph, Workload]:
    """`depth` activations, each made from the one before it, and used once more on the way back.

    `slow`: the op that takes ten times as long. `bandwidth`: bytes per second to the host and back.
    """
    b = GraphBuilder()
    given = b.storage(StorageKind.INPUT, _SIZE, planned=False)
    made = [b.storage(StorageKind.ACTIVATION, _SIZE, planned=True) for _ in range(depth)]
    for i, value in enumerate(made):
        b.op(Phase.FORWARD, (made[i - 1] if i else given,), (value,), target=f"f{i}")
    out = []
    for i in reversed(range(depth)):
        out.append(b.storage(StorageKind.GRADIENT, _SIZE, planned=False))
        b.op(Phase.BACKWARD, (made[i],), (out[-1],), target=f"b{i}")
    graph = b.graph((), tuple(out))
    link = Link(bytes_per_second=bandwidth, latency=0.0)
    measured = {signature_of(graph, op): (10 * _OP if i == slow else _OP) for i, op in enumerate(graph.ops)}
    costs = replace(DEVICES["a100"], measured=measured, to_host=link, to_device=link)
    workload = workload_of(graph, costs=costs)
    return graph, replace(workload, budget=measure(workload, workload.plain).peak - _SIZE)


def test_P5_free_time_is_the_gap_less_the_way_out_and_back() -> None:  # noqa: N802
    _, workload = _chain(4, bandwidth=200.0)
    first = gaps_of(workload)[0]
    assert (first.evicted_access, first.back_access) == (1, 7)
    assert first.free_time == pytest.approx(5 * _OP - 0.5 - 0.5)


def test_P5_a_swap_that_hides_is_free() -> None:  # noqa: N802
    graph, workload = _chain(6, bandwidth=200.0)
    events = capuchin(workload)
    _, figures = judged(graph, workload, events)
    assert figures.peak <= workload.budget
    assert figures.seconds == pytest.approx(sum(workload.seconds))
    assert [event.of for event in events if event.kind is Kind.OFFLOAD] == [gaps_of(workload)[0].storage]


def test_P5_where_none_hides_the_most_bytes_per_second_are_computed_again() -> None:  # noqa: N802
    graph, workload = _chain(6, bandwidth=1.0, slow=0)
    events = capuchin(workload)
    assert judged(graph, workload, events)[1].peak <= workload.budget
    runs = [event.of for event in events if event.kind is Kind.RUN]
    again = [op for k, op in enumerate(runs) if op in runs[:k]]
    assert again == [1]  # of those that cost least the first; op 0 costs ten times as much
    assert not any(event.kind is Kind.OFFLOAD for event in events)


def test_P5_a_source_that_is_gone_is_counted_too() -> None:  # noqa: N802
    _, workload = _chain(6, bandwidth=1.0)
    made = [writes[0] for writes in workload.writes[:6]]
    back = workload.uses[made[3]][-1]
    assert recompute_seconds(workload, made[3], frozenset(), back) == pytest.approx(_OP)
    assert recompute_seconds(workload, made[3], frozenset({made[2]}), back) == pytest.approx(2 * _OP)
    assert recompute_seconds(workload, made[3], frozenset({made[2], made[1]}), back) == pytest.approx(3 * _OP)
    assert recompute_seconds(workload, made[3], frozenset({made[1]}), back) == pytest.approx(_OP)
