"""Where the default policy starts: others' events as decisions, and what follows from starting there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.checkpoint import checkpoint, with_blocks
from memplan.evict.policies.dtr import dtr
from memplan.evict.search import DecisionSearch, decisions_of
from memplan.evict.workload import floor
from tests.evict.judge import workload_of
from tests.graph_strategies import graphs
from tests.models import traced_nano


@settings(max_examples=10)
@given(graphs(max_ops=10))
def test_never_slower_than_dtr(graph: Graph) -> None:
    workload = workload_of(graph)
    plain = measure(workload, workload.plain).peak
    for share in (0.8, 0.6, 0.4):
        at = replace(workload, budget=max(int(plain * share), floor(workload)[0]))
        try:
            theirs = measure(at, dtr(at)).seconds
        except BudgetInfeasible:
            continue
        for policy in (auto, recompute):
            assert measure(at, policy(at)).seconds <= theirs * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_events_become_decisions_that_can_be(share: float) -> None:
    workload = workload_of(traced_nano("gpt2").graph, alignment=64)
    workload = replace(workload, budget=int(measure(workload, workload.plain).peak * share))
    search = DecisionSearch(workload)
    start = search.start()
    found = decisions_of(search, dtr(workload))
    assert found.area < start.area
    assert found.decision.any()
    again = decisions_of(search, workload.plain)
    assert not again.decision.any()
    assert (again.area, again.seconds) == (start.area, start.seconds)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_checkpoint_around_each_block_is_a_start_where_the_model_has_none(name: str) -> None:
    workload = workload_of(traced_nano(name).graph, alignment=64)
    events = checkpoint(with_blocks(workload))
    by_hand = measure(workload, events)
    assert by_hand.peak < 0.9 * measure(workload, workload.plain).peak
    assert with_blocks(with_blocks(workload)) == with_blocks(workload), "marks that are there stay"
    at = replace(workload, budget=by_hand.peak)
    assert measure(at, recompute(at, quick=True)).seconds <= by_hand.seconds * (1 + 1e-9)
