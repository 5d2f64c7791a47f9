"""One attempt at a capacity: what is searched, what is reused, and how large pieces are searched in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.instances import mixed_lives
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, solve, solve_at_capacity, thresholds
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, ProblemArrays, load_of, make_problem_arrays
from memplan.solvers.base import WorkBudget
from memplan.solvers.heuristics import SqueakyWheel
from memplan.solvers.solve_at_capacity import _alive_in, _track_overflows, attempt

_SOLVED, _EXHAUSTED, _LIMIT = PieceOutcome.SOLVED, PieceOutcome.EXHAUSTED, PieceOutcome.LIMIT


def _rings(*sizes: tuple[int, int, int], below: int = 0) -> ProblemArrays:
    """Rings of three buffers, one after the other in time: the least arena of one is the sum of its sizes."""
    made = [Buffer(id="below", size=below, live=Interval(0, 10 * len(sizes)))]
    for k, (one, two, three) in enumerate(sizes):
        at = 10 * k
        made.append(Buffer(id=f"{k}a", size=one, live=Interval(at, at + 5), gaps=(Interval(at + 1, at + 4),)))
        made.append(Buffer(id=f"{k}b", size=two, live=Interval(at, at + 3)))
        made.append(Buffer(id=f"{k}c", size=three, live=Interval(at + 2, at + 5)))
    return make_problem_arrays(Problem(buffers=tuple(made)))


def _arrays(*rows: tuple[int, int, int]) -> ProblemArrays:
    """Buffers (size, start, end)."""
    return make_problem_arrays(
        Problem(buffers=tuple(Buffer(id=str(i), size=n, live=Interval(a, b)) for i, (n, a, b) in enumerate(rows)))
    )


class _Search:
    """Stands for the tree search: stacks a piece, notes which, and answers `outcome`."""

    def __init__(self, outcome: PieceOutcome = _SOLVED) -> None:
        self.outcome, self.pieces = outcome, []  # type: ignore[var-annotated]

    def __call__(self, piece: Instance, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
        self.pieces.append(piece.arrays.source.tolist())
        return self.outcome, piece.arrays.low + np.cumsum(piece.arrays.size) - piece.arrays.size


def _attempt(arrays: ProblemArrays, capacity: int, **given: Any) -> tuple[PieceOutcome, list[int], int]:
    budget = WorkBudget(SolverLimits(work=10_000))
    outcome, offsets = attempt(arrays, arrays.max_offset(capacity), budget, 0, **given)
    return outcome, offsets.tolist(), budget.spent


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> _Search:
    """The search of pieces, with no heuristic before it."""
    made = _Search()
    monkeypatch.setattr(solve_at_capacity, "search", made)
    monkeypatch.setattr(thresholds, "QUICK", 0)
    return made


def test_an_attempt_costs_three_units_a_buffer_and_three_hundred(search: _Search) -> None:
    arrays = _rings((2, 3, 4))
    assert _attempt(arrays, 2) == (_EXHAUSTED, [-1, -1, -1], 300 + 3 * 3 + 1)
    assert _attempt(arrays, 8)[2] == 300 + 3 * 3 + 1 + 1  # and the call that places no peeled buffer
    assert search.pieces == [[0, 1, 2]]


def test_repeated_layers_are_searched_once(search: _Search) -> None:
    arrays = _rings((2, 3, 4), (2, 5, 2), (2, 3, 4), below=6)
    outcome, offsets, _ = _attempt(arrays, 14)
    assert outcome is _LIMIT  # the stub stacks 9 units on 6
    assert search.pieces == [[1, 2, 3], [4, 5, 6]]
    assert offsets == [0, 6, 8, 11, 6, 8, 13, 6, 8, 11]


def test_what_is_searched_above_its_limit_is_no_solution(search: _Search) -> None:
    """The stub stacks 9 units where only 8 are allowed."""
    assert _attempt(_rings((2, 3, 4)), 8)[0] is _LIMIT
    assert _attempt(_rings((2, 3, 4)), 9)[:2] == (_SOLVED, [0, 2, 5])


@pytest.mark.parametrize("outcome", [_EXHAUSTED, _LIMIT])
def test_a_piece_that_is_not_solved_ends_the_attempt(search: _Search, outcome: PieceOutcome) -> None:
    search.outcome = outcome
    arrays = _rings((2, 3, 4), (5, 3, 4))
    assert _attempt(arrays, 10)[0] is outcome
    assert len(search.pieces) == 1


def test_heuristics_come_before_the_search(search: _Search, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def answers(arrays: ProblemArrays) -> Any:
        for k in range(9):
            tried.append(k)
            yield np.array([0, 1, 4]) if k == 2 else np.array([7, 7, 7])

    monkeypatch.setattr(solve_at_capacity, "first_answers", answers)
    monkeypatch.setattr(thresholds, "QUICK", 2)
    assert _attempt(_rings((2, 3, 4)), 8)[0] is _LIMIT
    assert tried == [0, 1]
    monkeypatch.setattr(thresholds, "QUICK", 3)
    tried.clear()
    assert _attempt(_rings((2, 3, 4)), 8)[:2] == (_SOLVED, [0, 1, 4])
    assert tried == [0, 1, 2]
    assert len(search.pieces) == 1


def test_buffers_of_tracked_sections_and_pinned_ones_are_searched() -> None:
    made = (
        Buffer(id="a", size=1, live=Interval(0, 2)),
        Buffer(id="b", size=1, live=Interval(1, 9), gaps=(Interval(3, 6),)),
        Buffer(id="c", size=1, live=Interval(4, 5)),
        Buffer(id="pin", size=1, live=Interval(20, 21), pinned_offset=3),
        Buffer(id="d", size=1, live=Interval(30, 31)),
    )
    arrays = make_problem_arrays(Problem(buffers=made))
    for section in range(arrays.sections):
        tracked = np.zeros(arrays.sections, np.bool_)
        tracked[section] = True
        alive = {i for i, b in enumerate(made) if any(s.start <= arrays.steps[section] < s.end for s in b.segments)}
        assert set(_alive_in(arrays, tracked).tolist()) == alive | {3}


def test_the_busiest_sections_of_the_buffers_furthest_above_their_limits_are_tracked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrays = _arrays((1, 0, 2), (5, 1, 3), (2, 2, 6), (1, 4, 5), (9, 5, 8), (1, 7, 9))
    load = load_of(arrays)
    assert load.tolist() == [6, 7, 3, 11, 10]

    def tracked(added: int, over: list[int], *known: int) -> list[int]:
        monkeypatch.setattr(thresholds, "ADDED", added)
        found = np.zeros(arrays.sections, np.bool_)
        found[list(known)] = True
        _track_overflows(arrays, np.array(over) + 10, np.full(6, 10), load, found)
        return np.flatnonzero(found).tolist()

    assert tracked(8, [3, 0, 0, 0, 0, -5]) == [0]
    assert tracked(8, [0, 1, 0, 0, 0, 0]) == [1]
    assert tracked(8, [0, 0, 1, 0, 0, 0]) == [3]
    assert tracked(8, [0, 0, 0, 1, 0, 1]) == [2, 4]
    assert tracked(1, [1, 2, 0, 0, 0, 0]) == [1]
    assert tracked(2, [1, 2, 3, 4, 0, 0]) == [2, 3]
    assert tracked(1, [1, 2, 3, 0, 0, 0], 3) == [1, 3]  # one that is tracked already does not count
    assert tracked(8, [0, 0, 0, 0, 0, 0]) == []


def test_a_large_piece_is_searched_through_its_busiest_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """First what is alive in the busiest section; the rest goes around it, and what is then too high is added."""
    for name, value in (("LARGE", 5), ("TRACKED", 1), ("ADDED", 1)):
        monkeypatch.setattr(thresholds, name, value)
    arrays = _arrays((3, 0, 3), (4, 2, 6), (5, 2, 5), (2, 4, 9), (3, 7, 10), (1, 8, 12))
    assert load_of(arrays).tolist() == [12, 11, 6]
    given: list[list[int]] = []
    inside: list[Ints] = []

    def inner(
        part: ProblemArrays, highest: Ints, budget: WorkBudget, seed: int, *, core: bool
    ) -> tuple[PieceOutcome, Ints]:
        assert core
        assert highest.tolist() == arrays.max_offset(14)[part.source].tolist()
        given.append(part.source.tolist())
        budget.spend(10, 1)
        return outcomes[len(given) - 1], inside[len(given) - 1]

    def placed(known: list[int]) -> tuple[PieceOutcome, list[int]]:
        given.clear()
        budget = WorkBudget(SolverLimits(work=40))
        outcome, offsets = solve_at_capacity._place_large(arrays, arrays.max_offset(14), budget, 0, np.array(known))
        return outcome, offsets.tolist()

    monkeypatch.setattr(solve_at_capacity, "attempt", inner)
    monkeypatch.setattr(solve_at_capacity, "search", lambda piece, budget, seed: (_SOLVED, np.arange(6)))
    outcomes, inside = [_SOLVED] * 9, [np.array([0, 3, 7])] * 9
    assert placed([0] * 6) == (_SOLVED, [0, 3, 7, 0, 2, 5])
    assert given == [[0, 1, 2]]
    outcomes = [_EXHAUSTED]
    assert placed([0] * 6)[0] is _EXHAUSTED
    outcomes = [_SOLVED, _SOLVED]
    inside = [np.array([3, 6, 0, 9])] * 2
    monkeypatch.setattr(thresholds, "ROUND", -1)  # without squeaky-wheel optimization
    outcomes, inside = [_SOLVED] * 9, [np.array([0, 3, 7])] * 9
    assert placed([0] * 6) == (_SOLVED, [0, 3, 7, 12, 0, 3])
    outcomes = [_SOLVED, _SOLVED]
    inside = [np.array([3, 6, 0, 9])] * 2
    placed([0, 0, 0, 13, 0, 0])  # the fourth is known to end too high: its busiest section is tracked too
    assert given[0] == [0, 1, 2, 3]


def test_at_a_limit_a_large_piece_has_its_lowest_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE", 1), ("TRACKED", 1), ("ADDED", 1)):
        monkeypatch.setattr(thresholds, name, value)
    arrays = _arrays((3, 0, 3), (4, 2, 6), (5, 2, 5), (2, 4, 9), (3, 7, 10), (1, 8, 12))
    around = iter([[0, 3, 7, 19, 0, 3], [0, 3, 7, 15, 0, 3], [0, 3, 7, 17, 0, 3]])

    def inner(part: ProblemArrays, *_: object, core: bool) -> tuple[PieceOutcome, Ints]:
        return _SOLVED, np.zeros(part.n, np.int64)

    def completed(arrays: ProblemArrays, core: Ints, limit: Ints, wheel: object, budget: WorkBudget) -> Ints:
        found = next(around)
        budget.spend(9, 1)
        return np.array(found)

    monkeypatch.setattr(solve_at_capacity, "attempt", inner)
    monkeypatch.setattr(solve_at_capacity, "_around", completed)
    monkeypatch.setattr(solve_at_capacity, "_alive_in", lambda arrays, tracked: np.arange(2))
    known = np.array([90] * 6)
    budget = WorkBudget(SolverLimits(work=30))
    outcome, offsets = solve_at_capacity._place_large(arrays, arrays.max_offset(14), budget, 0, known)
    assert (outcome, offsets.tolist()) == (PieceOutcome.LIMIT, [0, 3, 7, 15, 0, 3])


def test_what_does_not_fit_on_top_of_a_core_is_placed_in_its_holes() -> None:
    arrays = _arrays((4, 0, 2), (2, 0, 4), (3, 2, 4), (1, 0, 1))
    limit, budget = arrays.max_offset(7), WorkBudget(SolverLimits(work=1_000))
    core = np.array([3, -1, -1, -1])
    wheel = SqueakyWheel(arrays, limit)
    assert solve_at_capacity._around(arrays, core, limit, wheel, budget).tolist() == [3, 0, 2, 2]
    assert budget.spent  # by first-fit: on the skyline the second would begin at 7
    assert core.tolist() == [3, -1, -1, -1]


@pytest.mark.parametrize("seed", range(4))
def test_a_large_problem_reaches_max_live_through_its_core(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Long and short lives mixed: first-fit alone ends far above."""
    problem = mixed_lives(1_500, seed=seed)
    greedy = solve(problem, solver="greedy")
    monkeypatch.setattr(thresholds, "LARGE", 200)
    solution = solve(problem, work_limit=400_000)
    validate(problem, solution)
    assert greedy.gap > 0.01
    assert solution.gap < greedy.gap / 4
