"""The order of attempts: arms of a variant, variants of a piece, and capacities of a problem. The kernels are stubs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.errors import SolverFault
from memplan.solvers import SolverLimits, capacity_search, thresholds, tree_search
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers import tree_search as search_variant
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, instance_of, make_problem_arrays
from memplan.solvers.base import Progress, WorkBudget
from memplan.solvers.capacity_search import Answers, CapacitySearch
from memplan.solvers.tree_search import RULES, Floats, SearchVariant, luby, unjoined
from tests.solvers.small import small_problem

_SOLVED, _EXHAUSTED, _LIMIT = PieceOutcome.SOLVED, PieceOutcome.EXHAUSTED, PieceOutcome.LIMIT


def _problem(*rows: tuple[int, int, int], capacity: int | None = None) -> Problem:
    """Buffers (size, start, end)."""
    made = tuple(Buffer(id=str(i), size=size, live=Interval(a, b)) for i, (size, a, b) in enumerate(rows))
    return Problem(buffers=made, capacity=capacity)


def _piece(*rows: tuple[int, int, int], capacity: int = 100) -> Instance:
    arrays = make_problem_arrays(_problem(*rows))
    return instance_of(arrays, arrays.max_offset(capacity))


_ROWS = ((3, 0, 4), (5, 0, 1), (7, 1, 3), (2, 3, 4))


def test_luby_sequence() -> None:
    assert [luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


def test_rankings_of_buffers() -> None:
    """Live sections, load of these, area, size, and size by live sections squared; the loads are 8, 10 and 5."""
    life, load, area, size, mixed = (key.tolist() for key in search_variant._rankings(_piece(*_ROWS).arrays))
    assert life == [3, 1, 1, 1]
    assert load == [23, 8, 10, 5]
    assert area == [9, 5, 7, 2]
    assert size == [3, 5, 7, 2]
    assert mixed == [27, 5, 7, 2]


class _Searches:
    """Records the calls of `search_once`, and answers that `left` units stay unplaced."""

    def __init__(self, left: Callable[[int], int] = lambda call: 100) -> None:
        self.left, self.calls = left, []  # type: ignore[var-annotated]

    def __call__(self, piece: Instance, key: Ints, **given: Any) -> tuple[PieceOutcome, int, Ints]:
        self.calls.append({"key": key, **given})
        return _LIMIT, self.left(len(self.calls) - 1), np.zeros(piece.arrays.n, np.int64)


def _variant(monkeypatch: pytest.MonkeyPatch, searches: _Searches, runs: int) -> list[dict[str, Any]]:
    monkeypatch.setattr(search_variant, "search_once", searches)
    monkeypatch.setattr(thresholds, "LEAST_NODES", 1)
    variant = SearchVariant(unjoined(_piece(*_ROWS)), np.zeros(4, np.int64), 9)
    random = np.random.default_rng(0)
    for _ in range(runs):
        variant.run(WorkBudget(SolverLimits(work=1)), random)
    assert variant.runs == runs
    assert variant.size == 4
    return searches.calls


def test_every_ranking_is_first_run_briefly_with_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _variant(monkeypatch, _Searches(), 20)
    keys = search_variant._rankings(_piece(*_ROWS).arrays)
    expected = [(key.tolist(), rule) for key in keys for rule in RULES]
    assert [(call["key"].tolist(), call["rule"]) for call in calls] == expected
    assert {call["nodes"] for call in calls} == {2 * 4}
    assert {call["salt"] for call in calls} == {9}


def test_then_arms_that_left_little_run_more_often_with_noise_and_luby_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _variant(monkeypatch, _Searches(lambda call: 1 if call == 13 else 100 + call), 420)[20:]
    assert [call["nodes"] for call in calls[:7]] == [4 * length for length in (1, 1, 2, 1, 1, 2, 4)]
    keys = search_variant._rankings(_piece(*_ROWS).arrays)
    best = [call for call in calls if call["rule"] == RULES[1] and _is_near(call["key"], keys[3])]
    assert len(best) > 30  # of 400 runs of 20 arms
    noise = np.array([np.log(call["key"] / keys[3]).std() for call in best])  # of deviation 0.05 or 0.3
    assert 0.2 < (noise < 0.1).mean() < 0.8
    assert 0.2 < (noise > 0.15).mean() < 0.8


def _is_near(key: Floats, ranking: Floats) -> bool:
    return float(np.abs(np.log(key / ranking)).max()) < 1.2 and np.argsort(key)[-1] == np.argsort(ranking)[-1]


def test_a_run_has_at_least_the_fewest_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = _Searches()
    monkeypatch.setattr(search_variant, "search_once", searches)
    variant = SearchVariant(unjoined(_piece(*_ROWS)), np.zeros(4, np.int64), 9)
    variant.run(WorkBudget(SolverLimits(work=1)), np.random.default_rng(0))
    assert searches.calls[0]["nodes"] == thresholds.LEAST_NODES == 100


def test_a_search_places_by_its_ranking_and_counts_its_nodes() -> None:
    piece = _piece(*((1 + k, 0, 1) for k in range(6)), capacity=21)
    budget = WorkBudget(SolverLimits(work=1_000))
    outcome, area, offsets = search_variant.search_once(
        piece, piece.arrays.size.astype(np.float64), rule=RULES[0], nodes=50, table=np.zeros(64, np.int64), salt=1,
        budget=budget,
    )  # fmt: skip
    assert (outcome, area) == (_SOLVED, 0)
    assert offsets.tolist() == [20, 18, 15, 11, 6, 0]  # largest first
    assert budget.spent == 6 + 1


def test_the_capacity_of_a_search_is_the_highest_end_that_a_buffer_may_have() -> None:
    piece = _piece((3, 0, 1), (5, 0, 1), capacity=8)
    budget = WorkBudget(SolverLimits(work=1_000))
    found = search_variant.search_once(
        piece, np.ones(2), rule=RULES[0], nodes=50, table=np.zeros(64, np.int64), salt=1, budget=budget
    )
    assert (found[0], found[2].tolist()) == (_SOLVED, [0, 3])


def test_a_search_ends_at_its_nodes_or_at_the_end_of_the_budget() -> None:
    """The proof that this problem has no placement takes more than a hundred nodes."""
    arrays = make_problem_arrays(small_problem(341, most=14, pins=True))
    piece = instance_of(arrays, arrays.max_offset(23))

    def run(nodes: int, work: int) -> tuple[PieceOutcome, int]:
        budget = WorkBudget(SolverLimits(work=work))
        key = piece.arrays.size.astype(np.float64)
        outcome, _, _ = search_variant.search_once(
            piece, key, rule=RULES[3], nodes=nodes, table=np.zeros(64, np.int64), salt=1,
            budget=budget,
        )  # fmt: skip
        return outcome, budget.spent

    assert run(10, 1_000) == (_LIMIT, 12 + 1)
    assert run(1_000, 10)[0] is _LIMIT


class _Variant:
    """A variant that spends 10 units and answers what it is told."""

    answers: tuple[PieceOutcome, ...] = ()
    log: list[float] = []  # noqa: RUF012

    def __init__(self, chance: float, *_: object) -> None:
        self.chance, self.runs = chance, 0
        self.size = 4 if chance == 0.0 else 2

    def run(self, budget: WorkBudget, random: object) -> tuple[PieceOutcome, Ints]:
        self.runs += 1
        budget.spend(9, 1)
        self.log.append(self.chance)
        return _LIMIT, np.zeros(4, np.int64)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The chance of a likely join in each run, in order."""
    monkeypatch.setattr(_Variant, "log", [])
    monkeypatch.setattr(tree_search, "SearchVariant", _Variant)
    monkeypatch.setattr(tree_search, "joined", lambda piece, *, chance, seed: chance)
    return _Variant.log


def test_the_three_kinds_of_variants_get_the_same_work(log: list[float]) -> None:
    runs = tree_search._Runs(_piece(*_ROWS), WorkBudget(SolverLimits(work=10**6)), 0)
    for _ in range(300):
        runs.next()
    kinds = [1.0 if chance == 1.0 else 0.0 if chance == 0.0 else 0.5 for chance in log]
    assert kinds[:3] == [1.0, 0.0, 0.5]
    assert all(90 <= kinds.count(kind) <= 110 for kind in (0.0, 0.5, 1.0))
    some = [chance for chance in log if 0.0 < chance < 1.0]
    lengths = [(some[0], 0)]
    for chance in some:
        lengths = [*lengths[:-1], (chance, lengths[-1][1] + 1)] if chance == lengths[-1][0] else [*lengths, (chance, 1)]
    assert [chance for chance, _ in lengths[:4]] == [0.8, 0.95, 0.9, 0.8]
    assert [length for _, length in lengths[:4]] == [10, 10, 20, 10]  # Luby's sequence, in tens


def test_a_variant_costs_half_a_unit_a_buffer_and_has_a_seed_of_its_own(
    log: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def joined(piece: Instance, *, chance: float, seed: int) -> float:
        seeds.append(seed)
        return chance

    monkeypatch.setattr(tree_search, "joined", joined)
    budget = WorkBudget(SolverLimits(work=1_000))
    runs = tree_search._Runs(_piece(*_ROWS), budget, 0)
    assert budget.spent == 2 * (4 // 2 + 1)
    for _ in range(60):
        runs.next()
    assert len(set(seeds)) == len(seeds) >= 4
    assert max(seeds) > 1 << 24


def test_without_joins_only_the_piece_itself_is_searched(log: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_search, "joined", lambda piece, *, chance, seed: 0.0)
    runs = tree_search._Runs(_piece(*_ROWS), WorkBudget(SolverLimits(work=10**6)), 0)
    for _ in range(5):
        assert runs.next()[0] is _LIMIT
    assert log == [0.0] * 5


def test_only_the_piece_as_it_is_proves_that_there_is_no_placement(
    log: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: _Variant, budget: WorkBudget, random: object) -> tuple[PieceOutcome, Ints]:
        budget.spend(9 if self.chance > 0.0 else 99, 1)
        self.log.append(self.chance)
        return (_EXHAUSTED if self.chance > 0.0 or len(self.log) > 8 else _LIMIT), np.zeros(4, np.int64)

    monkeypatch.setattr(_Variant, "run", run)
    runs = tree_search._Runs(_piece(*_ROWS), WorkBudget(SolverLimits(work=10**6)), 0)
    outcomes = [runs.next()[0]]
    while outcomes[-1] is _LIMIT:
        outcomes.append(runs.next()[0])
    assert outcomes[-1] is _EXHAUSTED
    assert log[-1] == 0.0
    assert log.count(1.0) == 1  # with all joins, it is not tried again


# Capacities. Three buffers in a ring: 60 bytes are the least, max live is 40; first-fit is told to need 100.
_RING = (Buffer(id="a", size=20, live=Interval(0, 5), gaps=(Interval(1, 4),)),
         Buffer(id="b", size=20, live=Interval(0, 3)), Buffer(id="c", size=20, live=Interval(2, 5)))  # fmt: skip
_FIRST = np.array([0, 2, 4])  # units of 20 bytes: an arena of 100


class _Attempts:
    """Records the calls of `attempt`, and solves capacities from `least` bytes on, exactly at the capacity."""

    def __init__(self, least: int, *, proves: bool = False, work: int = 100) -> None:
        self.least, self.proves, self.work = least, proves, work
        self.calls: list[dict[str, Any]] = []
        self.high: Ints = np.full(3, -1, np.int64)  # the offsets at a limit

    def __call__(
        self, arrays: Any, highest: Ints, budget: WorkBudget, seed: int, **given: Any
    ) -> tuple[PieceOutcome, Ints]:
        capacity = int((highest * arrays.unit + arrays.raw).max())
        self.calls.append({"capacity": capacity, "seed": seed, "work": budget.remaining_work(), **given})
        budget.spend(self.work - 1, 1)
        if capacity >= self.least:
            return _SOLVED, np.array([0, 1, (capacity - 20) // 20])
        return (_EXHAUSTED if self.proves else _LIMIT), self.high


def _searched(
    monkeypatch: pytest.MonkeyPatch,
    attempts: _Attempts,
    *,
    capacity: int | None = None,
    minimize: bool = True,
    work: int = 10_000,
    reports: list[Progress] | None = None,
    buffers: tuple[Buffer, ...] = _RING,
    first: Ints = _FIRST,
) -> CapacitySearch:
    monkeypatch.setattr(capacity_search, "attempt", attempts)
    monkeypatch.setattr(capacity_search, "first_answers", lambda arrays: iter([first]))
    problem = Problem(buffers=buffers, capacity=capacity)
    arrays = make_problem_arrays(problem)
    limits = SolverLimits(work=work, minimize=minimize, on_progress=None if reports is None else reports.append)
    search = CapacitySearch(arrays, Answers(problem, arrays), problem, WorkBudget(limits), limits)
    search.run(5)
    return search


def test_the_bound_is_tried_first_then_capacities_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "EFFORT", 150)
    attempts = _Attempts(10**6)
    search = _searched(monkeypatch, attempts, work=4_000)
    assert [call["capacity"] for call in attempts.calls[:3]] == [40, 80, 80]  # 85 % of the way from 40 to 99
    assert [call["seed"] for call in attempts.calls[:4]] == [5, 6, 7, 8]
    assert attempts.calls[0]["work"] == 400  # a tenth of it
    efforts = [call["work"] for call in attempts.calls[1:6]]
    assert efforts == [150, 300, 600, 1_200, 2_400]
    assert (search.bound, search.arena) == (40, 100)
    assert search.budget.is_over


def test_the_next_capacity_is_a_share_of_what_lies_between_the_bound_and_the_best_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [replace(b, size=size) for b, size in zip(_RING, (20, 19, 21), strict=True)]
    attempts = _Attempts(10**6)
    search = _searched(monkeypatch, attempts, buffers=tuple(sizes), first=np.array([0, 40, 79]))
    assert (search.bound, search.arena) == (41, 100)
    assert [call["capacity"] for call in attempts.calls[:3]] == [41, 41 + int(0.85 * 58), 41 + int(0.85 * 58)]


def test_steps_grow_after_success_and_fall_back_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = _Attempts(60)
    search = _searched(monkeypatch, attempts)
    assert search.arena == 60
    assert [call["capacity"] for call in attempts.calls[:5]] == [40, 80, 60, 40, 40]


def test_an_exhausted_capacity_raises_the_bound_to_the_next_multiple_of_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports: list[Progress] = []
    search = _searched(monkeypatch, _Attempts(60, proves=True), reports=reports)
    assert (search.bound, search.arena) == (60, 60)
    assert [(report.incumbent, report.bound) for report in reports][:3] == [(100, 40), (100, 60), (80, 60)]


@pytest.mark.parametrize(("capacity", "tried"), [(100, []), (99, [80]), (60, [60]), (39, [])])
def test_a_capacity_is_tried_itself_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, capacity: int, tried: list[int]
) -> None:
    attempts = _Attempts(60)
    search = _searched(monkeypatch, attempts, capacity=capacity, minimize=False)
    assert [call["capacity"] for call in attempts.calls] == tried
    assert [call["work"] for call in attempts.calls] == [9_500] * len(tried)
    assert search.arena == (tried[0] if tried else 100)


def test_with_a_capacity_the_arena_is_minimized_below_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = _Attempts(60)
    search = _searched(monkeypatch, attempts, capacity=100, minimize=True)
    assert search.arena == 60
    assert attempts.calls[0]["capacity"] == 40


def test_large_problems_are_promoted_before_they_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "LARGE", 2)
    given: list[tuple[list[int], int | None]] = []

    def rounds(arrays: Any, goal: Ints, budget: WorkBudget) -> Any:
        given.append((goal.tolist(), budget.remaining_work()))
        yield np.array([0, 1, 3])
        yield np.array([0, 1, 2])

    monkeypatch.setattr(squeaky_wheel, "rounds", rounds)
    attempts = _Attempts(10**6)
    search = _searched(monkeypatch, attempts)
    assert attempts.calls[0]["work"] == 4_000
    assert given == [([1, 1, 1], int(0.1 * 9_900))]
    assert search.arena == 60
    assert attempts.calls[1]["capacity"] in (40, 60)


def test_promotion_ends_when_it_no_longer_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "LARGE", 2)
    drawn: list[int] = []

    def rounds(arrays: Any, goal: Ints, budget: WorkBudget) -> Any:
        for turn in range(99):
            drawn.append(turn)
            yield np.array([0, 1, 3 if turn == 2 else 9])

    monkeypatch.setattr(squeaky_wheel, "rounds", rounds)
    search = _searched(monkeypatch, _Attempts(10**6))
    assert (search.arena, drawn) == (80, [0, 1, 2, 3, 4, 5, 6])


def test_a_placement_above_the_capacity_is_kept_if_it_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = _Attempts(10**6)
    attempts.high = np.array([0, 1, 2])
    assert _searched(monkeypatch, attempts).arena == 60
    attempts.high = np.array([0, 1, 8])
    assert _searched(monkeypatch, attempts).arena == 100
    attempts.high = np.array([0, 0, 2])  # invalid
    with pytest.warns(SolverFault, match="attempt"):
        assert _searched(monkeypatch, attempts).arena == 100


@pytest.mark.parametrize(("scan", "work"), [(1.0, 600), (1e9, 400)])
def test_the_bound_of_a_problem_too_large_for_first_fit_gets_more_work(
    monkeypatch: pytest.MonkeyPatch, scan: float, work: int
) -> None:
    monkeypatch.setattr(thresholds, "LARGE", 2)
    monkeypatch.setattr(thresholds, "ROUND", scan)
    monkeypatch.setattr(capacity_search, "first_fit_work", lambda arrays: 5)
    attempts = _Attempts(10**6)
    _searched(monkeypatch, attempts, work=1_000)
    assert attempts.calls[0]["work"] == work
