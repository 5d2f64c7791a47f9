"""Tests of what an op costs that draws random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.graph import Graph, Origin, Phase, StorageKind
from memplan.evict.costs import DEVICES
from tests.graph_strategies import GraphBuilder

NBYTES = 4096  # of a mask, and its elements


def _graph(*, random: bool, seeds: bool) -> Graph:
    """One op that reads 64 bytes and writes a mask; `seeds`: it reads those of Inductor."""
    b = GraphBuilder()
    read = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    mask = b.storage(StorageKind.ACTIVATION, NBYTES, planned=True)
    b.op(Phase.FORWARD, (read,), (mask,), random=random)
    graph = b.graph((mask,))
    if not seeds:
        return graph
    storages = (replace(graph.storages[0], origin=Origin(op="inductor_seeds")), *graph.storages[1:])
    return replace(graph, storages=storages)


@pytest.mark.parametrize(("random", "seeds", "draws"), [(True, False, 1), (False, True, 1), (False, False, 0)])
def test_a_random_number_takes_time_on_the_cpu(random: bool, seeds: bool, draws: int) -> None:
    graph, plain = _graph(random=random, seeds=seeds), _graph(random=False, seeds=False)
    cpu, h100 = DEVICES["cpu"], DEVICES["h100"]
    elements = graph.values[graph.ops[0].writes[0]].shape[0]
    more = cpu.op_seconds(graph, graph.ops[0]) - cpu.op_seconds(plain, plain.ops[0])
    assert more == pytest.approx(draws * cpu.draw * elements)
    assert h100.op_seconds(graph, graph.ops[0]) == h100.op_seconds(plain, plain.ops[0])
