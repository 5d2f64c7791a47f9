"""Cuts by networkx are what brute force and the prover find, and are found without the prover."""

from __future__ import annotations

import pytest
from hypothesis import given

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.schedule import cut_bound
from memplan.verify.cut import between_phases, least_at
from tests.graph_strategies import GraphBuilder, graphs
from tests.schedule import brute
from tests.schedule.test_bound import ladder


@given(graphs())
def test_cuts_are_those_of_the_prover(graph: Graph) -> None:
    assert [least_at(graph, op) for op in range(len(graph.ops))] == [
        cut_bound(graph, op) for op in range(len(graph.ops))
    ]
    if graph.ops:
        assert between_phases(graph) == cut_bound(graph, None)


def test_a_ladder_needs_more_than_any_of_its_ops_touches() -> None:
    assert max(least_at(ladder(4), op) for op in range(8)) == 410


def test_a_result_takes_the_bytes_of_an_input_that_nothing_needs_later() -> None:
    """x -> y in place: 64 bytes where y is made, unless another op needs x after it."""
    for reads_again, least in (((), 64), (("x",), 64), (("x", "y"), 128)):
        b = GraphBuilder()
        x, y, z = (b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(3))
        b.op(Phase.FORWARD, (), (x,))
        b.op(Phase.FORWARD, (x,), (y,), target="aten.tanh.default")
        if reads_again:
            b.op(Phase.FORWARD, tuple({"x": x, "y": y}[name] for name in reads_again), (z,))
        assert least_at(with_inplace_candidates(b.graph()), 1) == least


def test_what_the_caller_keeps_stays_alive() -> None:
    """a is planned and returned: alive beside c and d, although only op0 touches it."""
    b = GraphBuilder()
    a, c, d = (b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for nbytes in (100, 20, 3))
    b.op(Phase.FORWARD, (), (a, c))
    b.op(Phase.FORWARD, (c,), (d,))
    b.op(Phase.BACKWARD, (d,), ())
    graph = b.graph((a,))
    assert [least_at(graph, op) for op in range(3)] == [brute.least_at(graph, op) for op in range(3)] == [120, 123, 103]
    assert between_phases(graph) == 103


def test_the_prover_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the prover was asked")

    for name in ("cut.cut", "cut.cut_bound", "cut.min_cut", "graph_arrays.make_graph_arrays"):
        monkeypatch.setattr(f"memplan.schedule.{name}", refuse)
    assert least_at(ladder(3), 3) == 310
