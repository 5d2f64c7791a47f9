"""Ways down to the budget: by single storages, by classes of similar ones, and by random walks over either."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.evict import search as search_module
from memplan.evict import search_kernel
from memplan.evict.measure import measure
from memplan.evict.search import DecisionSearch, anneal_walk, descend, descend_classes, singles, storage_classes
from memplan.evict.search_kernel import PIN
from tests.evict.judge import workload_of
from tests.models import traced_nano


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


def test_a_walk_that_never_fits_has_no_best() -> None:
    """From just above the budget: with little work it stays there, with more it finds a best that fits."""
    search = _search(0.6)
    walked = anneal_walk(search, search.start(), storage_classes(search), work=0, seed=0, soft=1.0)
    assert walked.best is None
    assert walked.last.area == search.start().area
    coarse = descend_classes(search, search.start(), 1.0, storage_classes(search))
    short, long = (
        anneal_walk(search, coarse, singles(search), work=work, seed=0, soft=1.0) for work in (20_000, 4_000_000)
    )
    assert short.best is None
    assert 0 < short.last.area != coarse.area
    assert long.best is not None
    assert long.best.area == 0
    assert long.best.peak <= search.workload.budget < coarse.peak


def test_a_walk_that_has_nowhere_to_go_keeps_what_fits() -> None:
    search = _search(0.6)
    fits = descend(search, search.start(), 1.0)
    assert fits is not None
    walked = anneal_walk(search, fits, singles(search), work=0, seed=0, soft=1.0)
    assert walked.best is walked.last is fits


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_walk_over_few_options_takes_as_many_rounds_for_each(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search = _search(0.6)
    fits = descend(search, search.start(), 1.0)
    assert fits is not None
    options = singles(search)
    monkeypatch.setattr("memplan.evict.search._ROUNDS", rounds)
    taken: list[int] = []
    anneal = search_kernel.anneal

    def counted(*arguments: Any) -> Any:
        taken.append(arguments[6])
        return anneal(*arguments)

    monkeypatch.setattr(search_module, "anneal", counted)
    work = (len(search.workload.graph.ops) + 1) * 100_000
    walk = anneal_walk(search, fits, options, work=work, seed=3, soft=0.5)
    assert taken == [rounds * sum(map(len, options))]
    assert walk.best is not None
    assert walk.best.seconds <= fits.seconds
