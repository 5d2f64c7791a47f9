"""Ejection search: what it keeps between turns is a valid part of a placement, always."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.instances import planted
from memplan.core.problem import Problem
from memplan.solvers import SolverLimits, solve
from memplan.solvers.arrays.instance import Instance, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, make_problem_arrays
from memplan.solvers.limits import WorkBudget
from memplan.solvers.search.eject import Ejection, Learnt
from tests.strategies import problems


def _clashes(piece: Instance, offsets: Ints) -> list[tuple[int, int]]:
    tops = offsets + piece.arrays.size
    pairs = [
        (b, int(y))
        for b in np.flatnonzero(offsets >= 0).tolist()
        for y in piece.adj[piece.adj_ptr[b] : piece.adj_ptr[b + 1]]
        if offsets[y] >= 0
    ]
    return [(b, y) for b, y in pairs if offsets[b] < tops[y] and offsets[y] < tops[b]]


def _check(piece: Instance, offsets: Ints) -> None:
    arrays, placed = piece.arrays, offsets >= 0
    assert not _clashes(piece, offsets)
    assert (offsets <= piece.max_offset).all()
    assert (offsets >= arrays.low)[placed].all()
    assert not (offsets % arrays.align)[placed].any()


def _fitting(arrays: ProblemArrays, capacity: int) -> bool:
    return bool(arrays.n) and not (arrays.max_offset(capacity) < arrays.low).any()


@given(problem=problems(), data=st.data())
def test_what_is_placed_is_valid_after_any_number_of_turns(problem: Problem, data: st.DataObject) -> None:
    arrays = make_problem_arrays(problem)
    capacity = data.draw(st.integers(problem.max_live, solve(problem, solver="greedy").arena_size))
    if not _fitting(arrays, capacity):
        return
    piece = instance_of(arrays, arrays.max_offset(capacity))
    ejection = Ejection(piece, data.draw(st.integers(0, 5)))
    for turns in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)):
        solved = ejection.run(turns, WorkBudget(SolverLimits(work=100_000)))
        _check(piece, ejection.offsets)
        assert solved == bool((ejection.offsets >= 0).all())


def test_it_goes_on_under_another_capacity_from_what_it_learnt() -> None:
    arrays = make_problem_arrays(planted(60, seed=1, density=0.8))
    learnt = Learnt(np.full(arrays.n, -1, np.int64))
    for capacity in (1100, 1060, 1024):
        piece = instance_of(arrays, arrays.max_offset(capacity))
        ejection = Ejection(piece, 0, learnt)
        _check(piece, ejection.offsets)
        budget = WorkBudget(SolverLimits(work=2_000_000))
        while not budget.is_over and not ejection.run(1_000, budget):
            pass
        _check(piece, ejection.offsets)
        assert (ejection.offsets >= 0).all(), capacity


def test_equal_seeds_take_equal_turns() -> None:
    arrays = make_problem_arrays(planted(80, seed=2, density=0.9))
    piece = instance_of(arrays, arrays.max_offset(1024))
    ends = []
    for seed in (3, 3, 4):
        ejection = Ejection(piece, seed)
        ejection.run(500, WorkBudget(SolverLimits(work=1_000_000)))
        ends.append(ejection.offsets.tolist())
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize(("count", "seed", "density", "work"), [(40, 1, 0.9, 178), (40, 2, 1.0, 372), (60, 1, 0.8, 91)])
def test_the_work_until_a_fixed_problem_is_placed(count: int, seed: int, density: float, work: int) -> None:
    """Recorded, and the same on every machine: less is an improvement to record, more is a weaker search."""
    arrays = make_problem_arrays(planted(count, seed=seed, density=density))
    piece = instance_of(arrays, arrays.max_offset(1100))
    budget = WorkBudget(SolverLimits(work=5_000))
    assert Ejection(piece, 0, Learnt(np.full(arrays.n, -1, np.int64))).run(5_000, budget)
    assert budget.spent == work
