"""Ways down to the budget: by single storages, by classes of similar ones, and by random walks over either."""

from __future__ import annotations

import pytest

from memplan.evict.measure import measure
from memplan.evict.search import DecisionSearch, descend, descend_classes, singles, storage_classes
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
