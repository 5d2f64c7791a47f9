"""The heuristics over arrays, and the bounds of CP-SAT, on problems whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.instances import mixed
from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import SolverLimits, cpsat_model, heuristics, thresholds
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, make_problem_arrays
from memplan.solvers.base import WorkBudget
from memplan.solvers.heuristics import fill, first_answers, first_fit, first_fit_work, pairs_alive_together, unplaced
from tests.solvers.small import arrays_of, small_cores
from tests.strategies import problems


def test_pairs_are_those_whose_hulls_overlap() -> None:
    for _, arrays in small_cores(100, most=14):
        expected = sum(
            bool(arrays.lo[b] < arrays.hi[c] and arrays.lo[c] < arrays.hi[b]) for b in range(arrays.n) for c in range(b)
        )
        assert pairs_alive_together(arrays) == expected


def test_first_answers_go_by_size_then_by_area_then_by_life() -> None:
    for _, arrays in small_cores(60, most=12, pins=True):
        life = arrays.hi - arrays.lo
        expected = []
        for key in (arrays.size, arrays.size * life, life):
            order = sorted(np.flatnonzero(~arrays.pinned).tolist(), key=lambda b: (-key[b], arrays.lo[b], b))
            for best in (False, True):
                offsets = unplaced(arrays)
                first_fit(arrays, np.array(order, np.int64), offsets, best=best)
                expected.append(offsets.tolist())
        assert [offsets.tolist() for offsets in first_answers(arrays)] == expected


def test_with_too_many_pairs_an_allocator_answers_unless_a_buffer_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of((4, 0, 3), (2, 1, 4), (3, 2, 5))
    assert pairs_alive_together(arrays) == 3
    for most, count in ((3, 6), (2, 2)):
        monkeypatch.setattr(thresholds, "PAIRS", most)
        assert len(list(first_answers(arrays))) == count
    assert [o.tolist() for o in first_answers(arrays)] == [o.tolist() for o in heuristics.online(arrays, False, True)]
    pinned = make_problem_arrays(Problem(buffers=(Buffer(id="a", size=4, live=Interval(0, 3), pinned_offset=0),
                                      Buffer(id="b", size=2, live=Interval(1, 4)),
                                      Buffer(id="c", size=3, live=Interval(2, 5)))))  # fmt: skip
    assert len(list(first_answers(pinned))) == 6


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


def test_first_fit_selects_the_kernel_by_what_it_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.solvers import fit_kernel

    used: list[str] = []
    monkeypatch.setattr(fit_kernel, "fit", lambda *_: used.append("fit"))
    monkeypatch.setattr(fit_kernel, "fit_few", lambda *_: used.append("few"))
    arrays = arrays_of(*((1, k, k + 2) for k in range(6)))  # 36 pairs of buffers in either order, 5 alive together
    for few, scanned in ((5, 7), (5, 8), (6, 7)):
        monkeypatch.setattr(thresholds, "FEW", few)
        monkeypatch.setattr(thresholds, "SCANNED", scanned)
        first_fit(arrays, np.arange(6), unplaced(arrays))
    assert used == ["fit", "few", "few"]


@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_both_kernels_complete_a_placement_alike(best: bool, seed: int) -> None:
    """Gaps and alignments included, from placed buffers in any order of offsets."""
    from memplan.solvers import fit_kernel

    arrays = make_problem_arrays(mixed(300, seed=seed, longest=200))
    start = unplaced(arrays)
    first_fit(arrays, np.arange(0, arrays.n, 3)[::-1], start)
    order = np.flatnonzero(start < 0)
    few, tree = start.copy(), start.copy()
    segments = (arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi)
    fit_kernel.fit_few(order, int(best), arrays.size, arrays.align, arrays.low, *segments, few)
    fit_kernel.fit(order, int(best), arrays.size, arrays.align, arrays.low, *segments, arrays.sections, tree)
    assert few.tolist() == tree.tolist()


def test_the_work_of_first_fit_is_that_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of(*((1, 0, 2) for _ in range(600)))
    assert first_fit_work(arrays) == 600 * 600 // 6_000
    monkeypatch.setattr(thresholds, "FEW", 0)
    monkeypatch.setattr(thresholds, "SCANNED", 0)
    assert first_fit_work(arrays) == 600 * 599 // 2 // 16


# -- squeaky-wheel optimization ------------------------------------------------------------------------------


def _orders(monkeypatch: pytest.MonkeyPatch, arrays: ProblemArrays, goal: Ints, budget: WorkBudget) -> list[list[int]]:
    orders: list[list[int]] = []

    def noted(arrays: ProblemArrays, order: Ints, offsets: Ints) -> None:
        orders.append(order.tolist())
        first_fit(arrays, order, offsets)

    monkeypatch.setattr(squeaky_wheel, "first_fit", noted)
    list(squeaky_wheel.rounds(arrays, goal, budget))
    return orders


def test_a_buffer_above_its_goal_is_promoted_until_it_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of((9, 0, 2), (6, 0, 2), (1, 5, 6))
    goal = np.array([9, 0, 9])
    orders = _orders(monkeypatch, arrays, goal, WorkBudget(SolverLimits(work=5)))
    # Keys 9, 6 and nearly 0; times 1.3 in each round in which the second lies at 9: 6, 7.8, 10.1.
    assert orders == [[0, 1, 2], [0, 1, 2], [1, 0, 2], [1, 0, 2], [1, 0, 2]]


def test_buffers_in_busy_sections_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is larger, but where it lives the load is half: (1/2) ** 8 of its size counts."""
    arrays = arrays_of((10, 0, 2), (7, 5, 7), (13, 5, 7))
    goal = arrays.max_offset(100)
    assert _orders(monkeypatch, arrays, goal, WorkBudget(SolverLimits(work=1))) == [[2, 1, 0]]


@given(problem=problems(aligned=False), data=st.data())
def test_the_busiest_section_of_every_lifetime(problem: Problem, data: st.DataObject) -> None:
    arrays = make_problem_arrays(problem)
    if arrays.n:
        value = np.array(data.draw(st.lists(st.integers(0, 99), min_size=arrays.sections, max_size=arrays.sections)))
        expected = [value[lo:hi].max() for lo, hi in zip(arrays.lo, arrays.hi, strict=True)]
        assert squeaky_wheel._highest(value, arrays.lo, arrays.hi).tolist() == expected


def test_a_round_that_would_not_end_in_time_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = arrays_of((9, 0, 2), (6, 0, 2), (1, 5, 6))
    budget = WorkBudget(SolverLimits(seconds=100.0))
    for work, count in ((30_000_000, 0), (20_000_000, 1)):
        monkeypatch.setattr(squeaky_wheel, "first_fit_work", lambda arrays, work=work: work)
        rounds = squeaky_wheel.rounds(arrays, arrays.max_offset(100), budget)
        assert len([offsets for offsets, _ in zip(rounds, range(1), strict=False)]) == count


def test_a_round_spends_the_work_of_first_fit() -> None:
    arrays = arrays_of(*((1 + k % 3, 0, 2) for k in range(300)))
    budget = WorkBudget(SolverLimits(work=1_000))
    rounds = squeaky_wheel.rounds(arrays, arrays.max_offset(100), budget)
    for count in (1, 2, 3):
        next(rounds)
        assert budget.spent == count * (300 * 300 // 6_000 + 1)


def test_keys_stay_finite() -> None:
    arrays = arrays_of((9, 0, 2), (6, 0, 2), (1, 5, 6))
    rounds = squeaky_wheel.rounds(arrays, np.array([-1, -1, -1]), WorkBudget(SolverLimits(work=4_000)))
    assert {tuple(offsets.tolist()) for offsets in rounds} == {(0, 9, 0)}


# -- CP-SAT ---------------------------------------------------------------------------------------------------


def _ring() -> ProblemArrays:
    """Three buffers that meet in a ring: 60 bytes are the least, max live is 40."""
    return make_problem_arrays(Problem(buffers=(Buffer(id="a", size=20, live=Interval(0, 5), gaps=(Interval(1, 4),)),
                                    Buffer(id="b", size=20, live=Interval(0, 3)),
                                    Buffer(id="c", size=20, live=Interval(2, 5)))))  # fmt: skip


def test_cpsat_minimizes_and_proves() -> None:
    arrays = _ring()
    outcome, offsets, bound = cpsat_model.minimise(arrays, np.array([0, 2, 4]), WorkBudget(SolverLimits(work=10**6)))
    assert (outcome, sorted(offsets.tolist()), bound) == (PieceOutcome.SOLVED, [0, 1, 2], 60)
    exact = arrays_of((33, 0, 2), (40, 0, 2), alignment=64)
    outcome, offsets, bound = cpsat_model.minimise(exact, np.array([0, 3]), WorkBudget(SolverLimits(work=10**6)))
    assert (outcome, sorted(offsets.tolist()), bound) == (PieceOutcome.SOLVED, [0, 1], 97)


def test_cpsat_decides_a_capacity() -> None:
    arrays = _ring()
    for capacity, expected in ((59, PieceOutcome.EXHAUSTED), (60, PieceOutcome.SOLVED)):
        budget = WorkBudget(SolverLimits(work=10**6))
        outcome, offsets = cpsat_model.decide(arrays, arrays.max_offset(capacity), arrays.low, budget)
        assert outcome is expected
        assert sorted(offsets.tolist()) == ([0, 1, 2] if outcome is PieceOutcome.SOLVED else [])
        assert budget.spent >= 1


def test_cpsat_respects_lowest_offsets_and_alignments() -> None:
    arrays = make_problem_arrays(Problem(buffers=(Buffer(id="pin", size=4, live=Interval(0, 2), pinned_offset=4),
                                    Buffer(id="a", size=3, live=Interval(0, 2), alignment=2),
                                    Buffer(id="b", size=2, live=Interval(1, 2), alignment=4))))  # fmt: skip
    outcome, offsets = cpsat_model.decide(
        arrays, arrays.max_offset(13), arrays.low, WorkBudget(SolverLimits(work=10**6))
    )
    assert outcome is PieceOutcome.SOLVED
    assert (offsets * arrays.unit).tolist()[0] == 4
    assert [int(at * arrays.unit) % align for at, align in zip(offsets, (1, 2, 4), strict=True)] == [0, 0, 0]
    assert cpsat_model.decide(arrays, arrays.max_offset(9), arrays.low, WorkBudget(SolverLimits(work=10**6)))[0] is (
        PieceOutcome.EXHAUSTED
    )


class _Solver:
    """Stands for CP-SAT: records its limits and finds nothing."""

    limits: dict[str, float] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.parameters = self
        self.deterministic_time = 0.5

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, float | int):
            self.limits[name] = value
        object.__setattr__(self, name, value)


@pytest.mark.parametrize(
    ("limits", "seconds", "deterministic"),
    [
        (SolverLimits(work=400_000), None, 2.0),
        (SolverLimits(work=0), None, 0.05),
        (SolverLimits(seconds=1e-9), 0.05, None),
        (SolverLimits(seconds=1e6, work=10**6), 1e6, 5.0),
    ],
)
def test_cpsat_runs_within_the_budget_with_one_worker(
    monkeypatch: pytest.MonkeyPatch, limits: SolverLimits, seconds: float | None, deterministic: float | None
) -> None:
    from ortools.sat.python import cp_model

    monkeypatch.setattr(_Solver, "limits", {})
    monkeypatch.setattr(cp_model, "CpSolver", _Solver)
    monkeypatch.setattr(cpsat_model, "run", lambda solver, model: cp_model.UNKNOWN)
    arrays, budget = _ring(), WorkBudget(limits)
    assert cpsat_model.decide(arrays, arrays.max_offset(60), arrays.low, budget)[0] is PieceOutcome.LIMIT
    assert _Solver.limits["num_workers"] == 1
    assert _Solver.limits.get("max_deterministic_time") == deterministic
    assert _Solver.limits.get("max_time_in_seconds") == (None if seconds is None else pytest.approx(seconds, rel=1e-3))
    assert budget.spent == 100_001
