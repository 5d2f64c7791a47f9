"""The search for decisions: descents, walks, classes of storages, and where it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies import auto as auto_module
from memplan.evict.policies.auto import MANY_OPS, auto, recompute
from memplan.evict.policies.dtr import Neighbourhoods, dtr
from memplan.evict.search import (
    DecisionSearch,
    anneal_walk,
    descend,
    descend_classes,
    singles,
    storage_classes,
    trimmed,
)
from memplan.evict.search_kernel import PIN
from memplan.evict.simulator import ByteCounter, DeviceState, EvictionKind, EvictionSimulator, Location
from memplan.evict.workload import Policy, Workload, floor
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import graphs
from tests.models import traced_nano


@pytest.fixture
def by_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is large."""
    monkeypatch.setattr(auto_module, "MANY_OPS", 1)


@pytest.fixture(scope="module")
def llama() -> Graph:
    """Blocks that repeat: two layers are enough for classes with several members."""
    return traced_nano("llama").graph


def _within(graph: Graph, share: float) -> Workload:
    workload = workload_of(graph, alignment=64)
    return workload.within(int(measure(workload, workload.plain).peak * share))


@settings(max_examples=25)
@given(graph=graphs(max_ops=10))
def test_events_are_valid_repeatable_and_no_slower_than_dtr(graph: Graph, by_classes: None) -> None:
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


class _Compared:
    """An evictor that holds each neighbourhood against a plain walk over the ops, and drops the first candidate."""

    swaps = False

    def __init__(self, workload: Workload) -> None:
        self.around, self.compared = Neighbourhoods(workload), 0
        self.pairs = [
            (r, s) for i in range(len(workload.graph.ops)) for s in workload.writes[i] for r in workload.reads[i]
        ]

    def choose(self, device: DeviceState, candidates: Sequence[int]) -> int:
        for s, seconds in zip(candidates, self.around.seconds(device, candidates), strict=True):
            below = self._reached(device, s, [(b, a) for a, b in self.pairs], (Location.GONE, Location.DEAD))
            above = self._reached(device, s, self.pairs, (Location.GONE,))
            used = {x for x in above if device.last[x] >= device.position}
            expected = sum(map(device.seconds, below)) + sum(map(device.seconds, used))
            assert seconds == pytest.approx(expected, rel=1e-9)
            self.compared += seconds > 0
        return candidates[0]

    def choose_kind(self, device: DeviceState, storage: int) -> EvictionKind:
        return EvictionKind.DROP

    def changed(self, device: DeviceState, storage: int) -> None:
        self.around.changed(device, storage)

    def _reached(
        self, device: DeviceState, storage: int, pairs: list[tuple[int, int]], through: tuple[Location, ...]
    ) -> set[int]:
        found, before = {storage}, 0
        while len(found) > before:
            before = len(found)
            found |= {b for a, b in pairs if a in found and device.where[b] in through}
        return found - {storage}


def test_neighbourhoods_are_those_of_a_plain_walk(llama: Graph) -> None:
    workload = _within(llama, 0.5)
    evictor = _Compared(workload)
    EvictionSimulator(workload, ByteCounter(workload.budget), evictor).simulate()
    assert evictor.compared > 20


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


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("swaps", [True, False])
def test_a_coarse_descent_stops_before_what_single_decisions_finish(share: float, *, swaps: bool) -> None:
    search = _search(share, swaps=swaps)
    start = search.start()
    coarse = descend_classes(search, start, 1.0, storage_classes(search))
    assert 0 < coarse.area <= start.area
    fine = descend(search, coarse, 1.0)
    assert fine is not None
    assert fine.area == 0
    assert fine.peak <= search.workload.budget


@pytest.mark.parametrize("soft", [1.0, 0.5])
def test_walks_are_repeatable_and_their_best_keeps_the_budget(soft: float) -> None:
    search = _search(0.6)
    fits = descend(search, search.start(), 1.0)
    assert fits is not None
    one, two = (anneal_walk(search, fits, singles(search), work=200_000, seed=3, soft=soft) for _ in range(2))
    assert one.best is not None
    assert two.best is not None
    assert (one.best.decision == two.best.decision).all()
    assert (one.last.decision == two.last.decision).all()
    assert one.best.area == 0
    assert one.best.seconds <= fits.seconds
    if soft < 1:  # the strict part never leaves the budget
        assert one.last.area == 0


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
            assert measure(at, policy(at, work=20_000)).seconds <= theirs * (1 + 1e-9)
