"""Checks before and after a solver runs, and the figures of a solution."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
from memplan.errors import InvalidProblem, InvalidSolution, UnsupportedProblem
from memplan.solvers import Progress, SolverLimits, select_solver, solve
from memplan.solvers.base import finish
from memplan.solvers.baselines import GREEDY
from memplan.solvers.placement import check_numbers, check_pins


def _buffer(name: str, size: int, start: int, end: int, **more: Any) -> Buffer:
    return Buffer(id=name, size=size, live=Interval(start, end), **more)


_TWO = (_buffer("a", 4, 0, 2), _buffer("b", 6, 1, 3))


class _Noted:
    """A solver that notes what it was given, and answers as greedy does."""

    name = "noted"

    def __init__(self, wrong: bool = False) -> None:
        self.given: list[tuple[Problem, SolverLimits, int]] = []
        self.wrong = wrong

    def refuses(self, problem: Problem) -> str | None:
        return "has no buffers" if not problem.buffers else None

    def solve(self, problem: Problem, *, limits: SolverLimits = SolverLimits(), seed: int = 0) -> Solution:  # noqa: B008
        self.given.append((problem, limits, seed))
        found = {b.id: 0 for b in problem.buffers} if self.wrong else GREEDY.solve(problem).offsets
        return finish(problem, found, solver="noted", seconds=0.0)


def test_what_is_given_reaches_the_solver() -> None:
    noted = _Noted()
    solve(_TWO, solver=noted)
    solve(iter(_TWO), capacity=12, time_limit=3.0, work_limit=7, seed=5, solver=noted)
    solve(Problem(buffers=_TWO, capacity=20), solver=noted)
    solve(Problem(buffers=_TWO, capacity=20), capacity=11, minimize=True, solver=noted)
    solve(_TWO, minimize=False, solver=noted)
    assert [(p.capacity, k.seconds, k.work, k.minimize, seed) for p, k, seed in noted.given] == [
        (None, None, None, True, 0),
        (12, 3.0, 7, False, 5),
        (20, None, None, False, 0),
        (11, None, None, True, 0),
        (None, None, None, False, 0),
    ]


def test_an_invalid_answer_is_never_returned() -> None:
    with pytest.raises(InvalidSolution):
        solve(_TWO, solver=_Noted(wrong=True))


def test_unknown_and_unfit_solvers_are_refused() -> None:
    problem = Problem(buffers=_TWO)
    assert select_solver(problem).name == select_solver(problem, "portfolio").name == "portfolio"
    assert select_solver(problem, "naive").name == "naive"
    with pytest.raises(UnsupportedProblem, match=r"(?s)no solver 'no such'.*choose one of: auto, portfolio, greedy, "):
        select_solver(problem, "no such")
    with pytest.raises(UnsupportedProblem, match="5 is no solver"):
        select_solver(problem, 5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="solver 'noted' does not take it: has no buffers"):
        select_solver(Problem(buffers=()), _Noted())


@pytest.mark.parametrize("name", ["time_limit", "work_limit"])
@pytest.mark.parametrize("limit", [-1, -0.001, float("nan"), "1"])
def test_limits_are_numbers_from_zero(name: str, limit: Any) -> None:
    with pytest.raises(InvalidProblem, match=f"{name}: .*not a number from 0 upwards"):
        solve(_TWO, **{name: limit})
    check_numbers(Problem(buffers=_TWO), 0, 0)


def test_sizes_and_steps_stay_within_sixty_bits() -> None:
    most = 1 << 60

    def check(*buffers: Buffer) -> None:
        check_numbers(Problem(buffers=buffers), None, None)

    check(_buffer("a", most - 2, 0, 1), _buffer("b", 0, 0, 1))
    check(_buffer("a", 1, 0, most))
    check(_buffer("a", 1, -most, 1))
    check()
    for buffers in (
        (_buffer("a", most - 1, 0, 1), _buffer("b", 0, 0, 1)),
        (_buffer("a", 1, 0, most + 1),),
        (_buffer("a", 1, -most - 1, 1),),
        (_buffer("a", 1, 0, 1, pinned_offset=most - 1),),
        (_buffer("a", 1, 0, 1, alignment=most),),
        (_buffer("a", 1, 0, 1, alignment=most // 2), _buffer("b", 1, 0, 1)),
    ):
        with pytest.raises(InvalidProblem, match="count sizes in larger units"):
            check(*buffers)


def test_pins_collide_where_bytes_and_steps_do() -> None:
    def pinned(*rows: tuple[int, int, int, int]) -> None:
        """Buffers (offset, size, start, end)."""
        buffers = [_buffer(str(i), n, a, b, pinned_offset=at) for i, (at, n, a, b) in enumerate(rows)]
        check_pins(Problem(buffers=tuple(buffers)))

    pinned((0, 4, 0, 2), (4, 4, 0, 2))
    pinned((0, 8, 0, 2), (4, 4, 2, 4))
    pinned((0, 8, 0, 2), (4, 0, 0, 2))
    pinned((0, 4, 0, 9), (4, 4, 5, 6), (8, 4, 0, 9))
    for rows in (
        ((0, 4, 0, 2), (3, 4, 1, 2)),
        ((3, 4, 1, 2), (0, 4, 0, 2)),
        ((0, 9, 0, 9), (2, 2, 20, 21), (4, 2, 3, 4)),
        ((5, 1, 0, 2), (5, 1, 0, 2)),
    ):
        with pytest.raises(InvalidProblem, match="inside the bytes pinned for"):
            pinned(*rows)
    late = _buffer("late", 4, 0, 9, pinned_offset=2, gaps=(Interval(2, 7),))
    check_pins(Problem(buffers=(late, _buffer("x", 4, 3, 6, pinned_offset=0))))
    with pytest.raises(InvalidProblem, match=r"buffer 'late': is pinned to 2, inside the bytes pinned for 'x'"):
        check_pins(Problem(buffers=(late, _buffer("x", 4, 3, 8, pinned_offset=0))))


@pytest.mark.parametrize(
    ("capacity", "gap", "bound", "status"),
    [
        (None, 0, 0, Status.OPTIMAL),
        (None, 1, 0, Status.FEASIBLE),
        (None, 1, 11, Status.OPTIMAL),
        (10, 0, 0, Status.OPTIMAL),
        (11, 1, 0, Status.FEASIBLE),
        (11, 1, 11, Status.OPTIMAL),
        (11, 2, 0, Status.UNKNOWN),
        (9, 0, 0, Status.INFEASIBLE),
        (11, 1, 12, Status.INFEASIBLE),
    ],
)
def test_status_of_a_finished_placement(capacity: int | None, gap: int, bound: int, status: Status) -> None:
    """Two buffers of 10 bytes together, with a gap between them; max live is 10."""
    problem = Problem(buffers=_TWO, capacity=capacity)
    solution = finish(problem, {"a": 0, "b": 4 + gap}, solver="test", seconds=0.5, bound=bound)
    assert (solution.status, solution.arena_size, solution.bound) == (status, 10 + gap, max(bound, 10))
    assert (solution.proof is not None) == (capacity == 9)
    assert (solution.solver, solution.seconds) == ("test", 0.5)


_RING = (_buffer("a", 20, 0, 5, gaps=(Interval(1, 4),)), _buffer("b", 20, 0, 3), _buffer("c", 20, 2, 5))


@pytest.mark.parametrize(
    ("buffers", "capacity", "minimize", "small", "searched"),
    [
        (_TWO, None, True, 2, False),  # greedy reaches max live
        (_TWO, None, True, 1, True),
        (_RING, None, True, 3, True),
        (_RING, 60, False, 3, False),
        (_RING, 59, False, 3, True),
        (_RING, 60, True, 3, True),
        (_RING, None, False, 3, True),
    ],
)
def test_the_portfolio_stops_where_greedy_is_enough(
    monkeypatch: pytest.MonkeyPatch,
    buffers: tuple[Buffer, ...],
    *,
    capacity: int | None,
    minimize: bool,
    small: int,
    searched: bool,
) -> None:
    from memplan.solvers import thresholds
    from memplan.solvers.capacity_search import CapacitySearch

    runs: list[int] = []
    real = CapacitySearch.run

    def run(self: CapacitySearch, seed: int) -> None:
        runs.append(seed)
        real(self, seed)

    monkeypatch.setattr(CapacitySearch, "run", run)
    monkeypatch.setattr(thresholds, "SMALL", small)
    reports: list[Progress] = []
    problem = Problem(buffers=buffers, capacity=capacity)
    solution = solve(problem, minimize=minimize, work_limit=20_000, seed=7, on_progress=reports.append)
    assert runs == ([7] if searched else [])
    assert solution.solver == "portfolio"
    assert (solution.arena_size, solution.bound >= problem.max_live) == (10 if buffers is _TWO else 60, True)
    assert (reports[-1].incumbent, reports[-1].bound) == (solution.arena_size, solution.bound)
    assert searched or len(reports) == 1
