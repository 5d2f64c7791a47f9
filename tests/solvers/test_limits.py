"""Budgets: what is left, what may run next, and what inner budgets spend of outer ones."""

from __future__ import annotations

import time

import pytest

from memplan.solvers.base import DEFAULT_WORK, SolverLimits, WorkBudget


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that budgets read, seconds; tests set it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_without_limits_there_is_a_default_of_work() -> None:
    assert WorkBudget(SolverLimits()).remaining_work() == DEFAULT_WORK == 1_000_000
    assert WorkBudget(SolverLimits(seconds=5.0)).remaining_work() is None
    assert WorkBudget(SolverLimits(seconds=5.0, work=7)).remaining_work() == 7


def test_time_is_counted_from_the_start(clock: list[float]) -> None:
    budget = WorkBudget(SolverLimits(seconds=8.0))
    clock[0] = 103.0
    assert (budget.seconds, budget.is_over) == (3.0, False)
    inner = budget.share(0.4)
    assert (inner.is_over, inner.seconds) == (False, 0.0)
    clock[0] = 105.0
    assert (inner.is_over, budget.is_over) == (True, False)
    clock[0] = 108.0
    assert budget.is_over
    assert budget.share(0.5).is_over


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
