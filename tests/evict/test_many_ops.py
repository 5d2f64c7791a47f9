"""The search over classes of storages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.dtr import dtr
from memplan.evict.search import DecisionSearch, descend, parts_of, storage_classes, trimmed
from memplan.evict.search_kernel import UNDECIDED
from memplan.evict.workload import Workload, floor
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


@settings(max_examples=25)
@given(graph=graphs(max_ops=10))
def test_events_are_valid_repeatable_and_no_slower_than_dtr(graph: Graph) -> None:
    workload = workload_of(graph)
    plain = measure(workload, workload.plain).peak
    for share in (0.8, 0.5):
        at = workload.within(max(int(plain * share), floor(workload)[0]))
        for policy in (auto, recompute):
            try:
                events = policy(at)
            except BudgetInfeasible:
                assert policy is recompute  # with copies, every budget above the floor can be kept
                continue
            assert policy(at) == events
            _, figures = judged(graph, at, events)
            assert figures.peak <= at.budget
            try:
                theirs = measure(at, dtr(at)).seconds
            except BudgetInfeasible:
                continue
            assert figures.seconds <= theirs * (1 + 1e-9)


def test_the_first_events_are_enough(llama: Graph) -> None:
    workload = _within(llama, 0.6)
    quick, whole = (measure(workload, recompute(workload, quick=quick)) for quick in (True, False))
    assert max(quick.peak, whole.peak) <= workload.budget
    assert whole.seconds <= quick.seconds


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
        less = trimmed(search, found)
        assert less.area == 0
        assert less.seconds <= found.seconds
        again = search.judged(less.decision, less.gap)
        assert (again.area, again.seconds) == (less.area, less.seconds)
    assert divided or swaps  # copies are so cheap here that whole classes are taken


def test_what_nothing_needs_is_taken_back(llama: Graph) -> None:
    tight, loose = (DecisionSearch(_within(llama, share), swaps=False) for share in (0.5, 0.9))
    state = descend(tight, tight.start(), 1.0)
    assert state is not None
    before = loose.judged(state.decision.copy(), state.gap.copy())
    after = trimmed(loose, before)
    assert after.area == 0
    assert after.seconds < before.seconds
    assert (after.decision != UNDECIDED).sum() < (before.decision != UNDECIDED).sum()


@pytest.mark.parametrize("count", [1, 2, 3, 1000])
def test_parts_have_every_move_of_a_class_once(llama: Graph, count: int) -> None:
    classes = storage_classes(DecisionSearch(_within(llama, 0.6)))
    parts = parts_of(classes, count)
    moves = [[m for options in choices for option in options for m in option] for choices in (classes, parts)]
    assert sorted(moves[0], key=repr) == sorted(moves[1], key=repr)
    members = [max(map(len, options)) for options in classes]
    assert len(parts) == sum(min(count, n) for n in members)
    assert all(part for options in parts for part in options)
