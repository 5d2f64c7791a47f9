"""Tests of what an op costs that draws random numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.core.evictions import SAVE_RNG
from memplan.core.graph import Graph, Origin, Phase, StorageKind
from memplan.errors import InvalidCosts
from memplan.evict.costs import DEVICES, load_costs
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


def test_saving_the_state_of_a_generator_draws_nothing() -> None:
    graph = _graph(random=True, seeds=False)
    saves = replace(graph.ops[0], target=SAVE_RNG)
    assert DEVICES["cpu"].op_seconds(graph, saves) < DEVICES["cpu"].op_seconds(graph, graph.ops[0])


def test_costs_of_drawing_are_saved_and_those_of_before_are_read(tmp_path: Path) -> None:
    DEVICES["cpu"].save(tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == DEVICES["cpu"]
    body = json.loads((tmp_path / "costs.json").read_text())
    assert body.pop("draw") == DEVICES["cpu"].draw
    (tmp_path / "before.json").write_text(json.dumps(body))
    assert load_costs(tmp_path / "before.json") == replace(DEVICES["cpu"], draw=0.0)


@pytest.mark.parametrize("draw", [-1e-9, float("inf"), float("nan")])
def test_an_impossible_time_to_draw_is_refused(draw: float) -> None:
    with pytest.raises(InvalidCosts, match="draw"):
        replace(DEVICES["cpu"], draw=draw)


def test_a_cost_model_is_shown_in_one_short_line() -> None:
    assert repr(DEVICES["h100"]) == "<CostModel of h100 (data sheet): 3.02e+12 B/s, 0 ops measured>"
    assert DEVICES["h100"].basis == "data sheet"
    assert replace(DEVICES["h100"], name="mine", measured={"aten.mm()": 1e-3}).basis == "measured"
