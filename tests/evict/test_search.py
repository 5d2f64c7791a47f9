"""The search for decisions: descents, walks, classes of storages, and where it starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies import auto as auto_module
from memplan.evict.policies.auto import MANY_OPS, auto, recompute
from memplan.evict.policies.dtr import dtr
from memplan.evict.search import (
    DecisionSearch,
    descend,
    singles,
    storage_classes,
    trimmed,
)
from memplan.evict.search_kernel import PIN
from memplan.evict.workload import Policy, Workload, floor
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import graphs
from tests.models import traced_nano


@pytest.fixture(scope="module")
def llama() -> Graph:
    """Blocks that repeat: two layers are enough for classes with several members."""
    return traced_nano("llama").graph


def _within(graph: Graph, share: float) -> Workload:
    workload = workload_of(graph, alignment=64)
    return workload.within(int(measure(workload, workload.plain).peak * share))


@pytest.mark.parametrize("many", [1, MANY_OPS])  # every step is large, or none
@settings(max_examples=15)
@given(graph=graphs(max_ops=10))
def test_events_are_valid_repeatable_and_no_slower_than_dtr(
    graph: Graph, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_module, "MANY_OPS", many)
    workload = workload_of(graph)
    plain = measure(workload, workload.plain).peak
    for share in (0.8, 0.5):
        at = workload.within(max(int(plain * share), floor(workload)[0]))
        for policy in (auto, recompute):
            try:
                events = policy(at, work=20_000)
            except BudgetInfeasible:
                assert policy is recompute  # with copies, every budget above the floor can be kept
                continue
            assert policy(at, work=20_000) == events
            _, figures = judged(graph, at, events)
            assert figures.peak <= at.budget
            try:
                theirs = measure(at, dtr(at)).seconds
            except BudgetInfeasible:
                continue
            assert figures.seconds <= theirs * (1 + 1e-9)


@pytest.mark.parametrize(("policy", "share"), [(auto, 0.6), (recompute, 0.6), (recompute, 0.4)])
def test_little_is_lost_beside_a_search_over_single_storages(
    llama: Graph, policy: Policy, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = _within(llama, share)
    assert len(llama.ops) < MANY_OPS  # so this is the search over single storages
    base, single = (measure(workload, events).seconds for events in (workload.plain, policy(workload)))
    monkeypatch.setattr(auto_module, "MANY_OPS", 1)
    events = policy(workload)
    _, figures = judged(llama, workload, events)
    assert figures.peak <= workload.budget
    assert figures.seconds <= single + 0.02 * base


@pytest.mark.parametrize("swaps", [True, False])
def test_of_the_last_class_only_what_is_needed_is_taken(llama: Graph, *, swaps: bool) -> None:
    divided = 0
    for share in (0.85, 0.65, 0.55):
        search = DecisionSearch(_within(llama, share), swaps=swaps)
        classes = storage_classes(search)
        found = descend(search, search.start(), 1.0, classes)
        assert found is not None
        assert found.area == 0
        for options in classes:
            taken = {int(found.decision[move.storage]) for option in options for move in option}
            divided += len(taken) > 1
        less = trimmed(search, found, classes=True)
        assert less.area == 0
        assert less.seconds <= found.seconds
        again = search.judged(less.decision, less.gap)
        assert (again.area, again.seconds) == (less.area, less.seconds)
    assert divided or swaps  # copies are so cheap here that whole classes are taken


def _search(share: float, **options: bool) -> DecisionSearch:
    workload = workload_of(traced_nano("llama").graph, alignment=64)
    return DecisionSearch(workload.within(int(measure(workload, workload.plain).peak * share)), **options)


def test_classes_hold_every_move_once_and_storages_of_one_size() -> None:
    search = _search(0.6)
    moves = [move for choices in storage_classes(search) for option in choices for move in option]
    expected = [m for choices in singles(search) for (m,) in choices if m.decision != PIN]
    assert sorted(moves, key=repr) == sorted(expected, key=repr)
    assert len(storage_classes(search)) < len(singles(search))
    for choices in storage_classes(search):
        assert len({search.workload.size[m.storage] for option in choices for m in option}) == 1
        for option in choices:
            assert len({m.decision for m in option}) == 1
            assert len({m.storage for m in option}) == len(option)
