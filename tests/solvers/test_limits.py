"""Budgets: what is left, what may run next, and an interrupt, which ends CP-SAT at once."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from ortools.sat.python import cp_model

from memplan.solvers.base import SolverLimits, WorkBudget
from memplan.solvers.cpsat_model import run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that budgets read, seconds; tests set it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_an_inner_budget_ends_with_the_outer_one(clock: list[float]) -> None:
    outer = WorkBudget(SolverLimits(work=100))
    inner = outer.share(1.0)
    outer.spend(100, 1)
    assert inner.spent == 0
    assert inner.is_over
    timed = WorkBudget(SolverLimits(seconds=2.0, work=1_000))
    part = timed.slice(10)
    assert not part.is_over
    clock[0] = 102.0
    assert part.is_over


def test_work_ends_exactly_at_the_limit() -> None:
    budget = WorkBudget(SolverLimits(work=12))
    budget.spend(10, 1)
    before = budget.is_over
    budget.spend(0, 1)
    assert (before, budget.is_over) == (False, True)
    assert WorkBudget(SolverLimits(work=0)).is_over


def test_nodes_stay_within_every_budget_and_are_at_least_one() -> None:
    outer = WorkBudget(SolverLimits(work=100))
    assert [outer.nodes(wanted, 1) for wanted in (0, 1, 99, 100, 101, 102, 1_000)] == [1, 1, 99, 100, 101, 101, 101]
    assert outer.nodes(1_000, 400) == 51
    assert outer.nodes(1_000, 300) == 67
    inner = outer.share(1.0)
    outer.spend(59, 1)
    assert inner.nodes(1_000, 1) == 41
    inner.spend(29, 1)
    assert outer.nodes(1_000, 1) == inner.nodes(1_000, 1) == 11
    outer.spend(500, 1)
    assert outer.nodes(1_000, 1) == 1


_LIMIT = 120.0


def _pigeons(count: int) -> cp_model.CpModel:
    """One pigeon more than holes: no answer, and a search that takes long to prove it."""
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(count)] for _ in range(count + 1)]
    for pigeon in inside:
        model.add_bool_or(pigeon)
    for hole in range(count):
        for i in range(count + 1):
            for j in range(i):
                model.add_bool_or([~inside[i][hole], ~inside[j][hole]])
    return model


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_presolve = False
    solver.parameters.symmetry_level = 0
    solver.parameters.max_time_in_seconds = _LIMIT
    return solver


def test_an_interrupt_stops_the_search_and_is_raised() -> None:
    before, began = signal.getsignal(signal.SIGINT), time.process_time()
    caller = threading.get_ident()
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(caller, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(_solver(), _pigeons(13))
    timer.join()
    assert time.process_time() - began < _LIMIT / 2  # it did not search until its limit
    assert not any(thread.name == "cp-sat" for thread in threading.enumerate())
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # the next one is heard too
        signal.raise_signal(signal.SIGINT)


def test_what_is_found_is_returned_and_what_fails_is_raised() -> None:
    solver = _solver()
    assert run(solver, _pigeons(3)) == cp_model.INFEASIBLE
    with pytest.raises(AttributeError):
        run(solver, None)  # type: ignore[arg-type]
