"""The heuristics over arrays, on problems whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import SolverLimits, heuristics, thresholds
from memplan.solvers.arrays import ProblemArrays, make_problem_arrays
from memplan.solvers.base import WorkBudget
from memplan.solvers.heuristics import fill, first_answers, first_fit, unplaced
from tests.solvers.small import arrays_of, small_cores


def test_first_answers_go_by_size_then_by_area_then_by_life() -> None:
    for _, arrays in small_cores(60, most=12, pins=True):
        life = arrays.hi - arrays.lo
        expected = []
        for key in (arrays.size, arrays.size * life, life):
            order = sorted(np.flatnonzero(~arrays.pinned).tolist(), key=lambda b: (-key[b], arrays.lo[b], b))
            offsets = unplaced(arrays)
            first_fit(arrays, np.array(order, np.int64), offsets)
            expected.append(offsets.tolist())
        assert [offsets.tolist() for offsets in first_answers(arrays)] == expected


def test_many_buffers_are_placed_by_an_allocator_unless_one_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of((4, 0, 3), (2, 1, 4), (3, 2, 5))
    for most, count in ((3, 3), (2, 2)):
        monkeypatch.setattr(thresholds, "MANY", most)
        assert len(list(first_answers(arrays))) == count
    assert [o.tolist() for o in first_answers(arrays)] == [o.tolist() for o in heuristics.online(arrays, False, True)]
    pinned = make_problem_arrays(Problem(buffers=(Buffer(id="a", size=4, live=Interval(0, 3), pinned_offset=0),
                                      Buffer(id="b", size=2, live=Interval(1, 4)),
                                      Buffer(id="c", size=3, live=Interval(2, 5)))))  # fmt: skip
    assert len(list(first_answers(pinned))) == 3


def _filled(
    arrays: ProblemArrays, capacity: int, placed: dict[int, int], order: list[int]
) -> tuple[list[int], list[int]]:
    offsets = np.full(arrays.n, -1, np.int64)
    for b, at in placed.items():
        offsets[b] = at
    above = fill(arrays, np.array(order), arrays.max_offset(capacity), offsets)
    return offsets.tolist(), above.tolist()


def test_fill_stacks_where_that_fits_and_uses_holes_for_the_rest() -> None:
    arrays = arrays_of((4, 0, 2), (3, 0, 2), (2, 0, 2), (1, 0, 9))
    assert _filled(arrays, 10, {0: 0}, [1, 2, 3]) == ([0, 4, 7, 9], [])
    assert _filled(arrays, 10, {0: 3}, [1, 2, 3]) == ([3, 7, 0, 2], [])  # on top fits only the first
    assert _filled(arrays, 10, {0: 5}, [1, 2, 3]) == ([5, 0, 3, 9], [])
    assert _filled(arrays, 9, {0: 0}, [1, 2, 3]) == ([0, 4, 7, 9], [3])
    assert _filled(arrays, 8, {0: 0}, [1, 2, 3]) == ([0, 4, 8, 7], [2])


def test_fill_starts_again_with_first_fit_where_the_skyline_wasted_a_hole() -> None:
    """On the skyline the first goes above the placed one, and then nothing is left for the second."""
    arrays = arrays_of((4, 0, 2), (2, 0, 2), (3, 0, 2))
    assert _filled(arrays, 9, {0: 2}, [1, 2]) == ([2, 0, 6], [])


def test_fill_gives_up_early_where_first_fit_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the skyline refused is then fitted, and that alone may not do."""
    arrays = arrays_of((4, 0, 2), (2, 0, 2), (3, 0, 2))
    monkeypatch.setattr(heuristics, "first_fit_work", lambda arrays: 5)
    monkeypatch.setattr(thresholds, "ROUND", 4)
    assert _filled(arrays, 9, {0: 2}, [1, 2]) == ([2, 6, 8], [2])
    monkeypatch.setattr(thresholds, "ROUND", 5)
    assert _filled(arrays, 9, {0: 2}, [1, 2])[1] == []


def test_fill_spends_work_on_what_the_skyline_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of(*((2, 0, 2) for _ in range(33)), (3, 0, 2))
    budget = WorkBudget(SolverLimits(work=10_000))
    offsets = np.full(arrays.n, -1, np.int64)
    monkeypatch.setattr(heuristics, "first_fit_work", lambda arrays: 340)
    assert len(fill(arrays, np.arange(34), arrays.max_offset(69), offsets, budget)) == 0
    assert budget.spent == 1
    refused = fill(arrays, np.arange(34), arrays.max_offset(50), np.full(arrays.n, -1, np.int64), budget)
    assert len(refused)
    assert budget.spent == 2 + 10 * len(refused)
