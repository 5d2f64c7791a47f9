"""A heuristic that is wrong costs its answer and a warning, never the plan and never the truth of its status."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
from memplan.core.validate import validate
from memplan.errors import SolverFault
from memplan.solvers import capacity_search, heuristics, portfolio, solve, solve_at_capacity, thresholds
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers.arrays import PieceOutcome
from tests.strategies import knotted


def _ring(capacity: int | None = None) -> Problem:
    """Three buffers that meet in a ring: 6 bytes are the least, max live is 4."""
    return Problem(
        buffers=(
            Buffer(id="a", size=2, live=Interval(0, 5), gaps=(Interval(1, 4),)),
            Buffer(id="b", size=2, live=Interval(0, 3)),
            Buffer(id="c", size=2, live=Interval(2, 5)),
        ),
        capacity=capacity,
    )


def _zeros(arrays: Any, *_: object, **__: object) -> Iterator[np.ndarray]:
    """Everything at 0: as small as an arena can be, and wrong."""
    yield np.zeros(arrays.n, np.int64)


def _solved(arrays: Any, *_: object, **__: object) -> tuple[PieceOutcome, np.ndarray]:
    return PieceOutcome.SOLVED, np.zeros(arrays.n, np.int64)


def _searched(piece: Any, *_: object, **__: object) -> tuple[PieceOutcome, np.ndarray]:
    return PieceOutcome.SOLVED, np.zeros(piece.arrays.n, np.int64)


def _fitted(arrays: Any, order: np.ndarray, offsets: np.ndarray, **_: object) -> None:
    offsets[order] = 0


def _greedy(problem: Problem) -> Solution:
    size = max(b.size for b in problem.buffers)
    return Solution(
        offsets={b.id: 0 for b in problem.buffers}, arena_size=size, status=Status.FEASIBLE, bound=0, solver="greedy"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A place where the portfolio takes answers, what is wrong there, and the thresholds that lead there."""

    module: Any
    name: str
    wrong: Any
    source: str  # as the warning names it
    lowered: dict[str, int] = field(default_factory=dict)

    def inject(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.module, self.name, self.wrong)
        for threshold, value in {"SMALL": 0, **self.lowered}.items():
            patch.setattr(thresholds, threshold, value)


_FAULTS = [
    _Fault(
        module=portfolio, name="GREEDY", wrong=SimpleNamespace(solve=_greedy), source="greedy", lowered={"SMALL": 400}
    ),
    _Fault(module=capacity_search, name="first_answers", wrong=_zeros, source="heuristics.first_answers"),
    _Fault(module=heuristics, name="first_fit", wrong=_fitted, source="heuristics.first_answers"),
    _Fault(module=heuristics, name="online", wrong=_zeros, source="heuristics.first_answers", lowered={"PAIRS": 0}),
    _Fault(module=solve_at_capacity, name="first_answers", wrong=_zeros, source="solve_at_capacity.attempt"),
    _Fault(
        module=solve_at_capacity,
        name="search",
        wrong=_searched,
        source="solve_at_capacity.attempt",
        lowered={"QUICK": 0},
    ),
    _Fault(
        module=solve_at_capacity,
        name="_place_large",
        wrong=_solved,
        source="solve_at_capacity.attempt",
        lowered={"LARGE": 0},
    ),
    _Fault(module=solve_at_capacity, name="_attempt", wrong=_solved, source="solve_at_capacity.attempt"),
    _Fault(module=squeaky_wheel, name="rounds", wrong=_zeros, source="squeaky_wheel.rounds", lowered={"LARGE": 0}),
]
_ALL = pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)


@_ALL
def test_a_faulty_answer_is_dropped_and_its_source_is_named_once(
    monkeypatch: pytest.MonkeyPatch, fault: _Fault
) -> None:
    problem = Problem(buffers=tuple(knotted(0)))
    least = solve(problem, solver="greedy").arena_size
    fault.inject(monkeypatch)
    with pytest.warns(SolverFault) as heard:
        solution = solve(problem, work_limit=5_000)
    texts = [str(warning.message) for warning in heard]
    assert [fault.source in text for text in texts].count(True) == 1
    assert all("gave a placement that the validator refuses" in t and "please report it" in t for t in texts)
    assert problem.max_live <= solution.arena_size
    assert solution.bound <= least


@_ALL
@pytest.mark.parametrize("capacity", [None, 4, 5, 6, 9])
def test_no_status_rests_on_a_faulty_answer(
    monkeypatch: pytest.MonkeyPatch, fault: _Fault, capacity: int | None
) -> None:
    fault.inject(monkeypatch)
    problem = _ring(capacity)
    for minimize in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverFault)
            solution = solve(problem, work_limit=3_000, minimize=minimize)
        validate(_ring(), replace(solution, status=Status.UNKNOWN, bound=0))
        assert solution.bound <= 6 <= solution.arena_size
        if capacity in (4, 5):
            assert solution.status in (Status.UNKNOWN, Status.INFEASIBLE)
        elif capacity == 9 or (capacity is None and solution.arena_size > solution.bound):
            assert solution.status is (Status.OPTIMAL if solution.arena_size == solution.bound else Status.FEASIBLE)
        elif solution.arena_size == 6:
            assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
        else:
            assert solution.status is Status.UNKNOWN


def test_a_bound_that_a_placement_refutes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "SMALL", 0)
    monkeypatch.setattr(capacity_search, "lower_bound", lambda arrays: 100)
    with pytest.warns(SolverFault, match="no arena is below 100 bytes is refuted by one of 6 bytes"):
        solution = solve(_ring())
    assert (solution.status, solution.arena_size, solution.bound) == (Status.OPTIMAL, 6, 6)
    with pytest.warns(SolverFault, match="refuted"):
        assert solve(_ring(capacity=7)).status in (Status.OPTIMAL, Status.FEASIBLE)
