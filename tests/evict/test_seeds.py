"""Where the default policy starts, and small steps on which its answers are held against trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.apply import apply
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import WorkloadArrays, measure, to_arrays
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.checkpoint import checkpoint, with_blocks
from memplan.evict.policies.dtr import dtr
from memplan.evict.search import DecisionSearch, decisions_of
from memplan.evict.workload import Event, Events, Kind, Workload, floor
from memplan.trace import trace
from tests.evict.judge import judged, workload_of
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


def test_no_pair_of_decisions_gives_back_a_result_with_other_bytes() -> None:
    """A kernel that runs again for one result gives its others back too, unless they would have other bytes by then."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph = trace(model, torch.randn(8, 16), train=True).graph
    search = DecisionSearch(workload_of(graph, budget=1), swaps=False, least=0.0)
    moves = [move for of_storage in search.moves for move in of_storage]
    ways = 0
    for one, two in combinations(moves, 2):
        if one.storage == two.storage:
            continue
        state = search.after(search.start(), one, two)
        if state.area < float("inf"):
            applied = apply(search.workload, search.events(state))
            require_equivalent(graph, applied.graph, applied.sources)
            ways += len(applied.graph.ops) > len(graph.ops)
    assert ways > 100


def _everything(workload: Workload) -> Iterator[Events]:
    """Every choice of what runs again before each op, in order; what is made again is dropped first."""
    made: dict[tuple[int, ...], list[int]] = {}
    for s, ops in enumerate(workload.writers):
        if workload.redo_until[s] >= 0:
            made.setdefault(ops, []).append(s)
    rows = []
    for t in range(len(workload.graph.ops)):
        able = [u for u, made_by in made.items() if u[-1] < t <= min(workload.redo_until[s] for s in made_by)]
        rows.append([chosen for k in range(len(able) + 1) for chosen in combinations(able, k)])
    for chosen in product(*rows):
        events: list[Event] = []
        for t, groups in enumerate(chosen):
            for i in sorted(i for group in groups for i in group):
                events += [Event(Kind.DROP, s) for s in workload.writes[i] if workload.writers[s][0] == i]
                events.append(Event(Kind.RUN, i))
            events.append(Event(Kind.RUN, t))
        yield tuple(events)


@given(graphs(max_ops=5), st.floats(0, 1))
def test_recompute_never_claims_more_than_trying_everything_finds(graph: Graph, share: float) -> None:
    workload = workload_of(graph)
    plain, least = measure(workload, workload.plain).peak, floor(workload)[0]
    workload = replace(workload, budget=round(least + share * (plain - least)))
    arrays = WorkloadArrays(workload)
    figures = [arrays.measure(*to_arrays(events)) for events in _everything(workload)]
    fitting = [one.seconds for one in figures if one is not None and one.peak <= workload.budget]
    try:
        events = recompute(workload)
    except BudgetInfeasible:
        assert workload.budget < plain
        return
    measured = judged(graph, workload, events)[1]
    assert measured.peak <= workload.budget
    assert measured.seconds >= min(fitting) * (1 - 1e-9)
