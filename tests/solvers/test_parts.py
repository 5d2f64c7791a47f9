"""The pieces that the portfolio is made of, each against its own definition."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances import network, planted, scattered
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, cpsat_model, solve
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers.arrays import (
    Instance,
    Ints,
    PieceOutcome,
    ProblemArrays,
    instance_of,
    lower_bound,
    make_problem_arrays,
)
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.heuristics import first_fit, unplaced
from memplan.solvers.solve_at_capacity import Piece, _peel, reduce
from memplan.solvers.tree_search import RULES, joined, search_once
from tests.strategies import problems


@pytest.mark.parametrize("seed", range(6))
def test_peeled_buffers_find_room_wherever_the_others_lie(seed: int) -> None:
    problem = network(8, seed=seed)
    arrays = make_problem_arrays(problem)
    greedy = unplaced(arrays)
    first_fit(arrays, np.lexsort((arrays.lo, -arrays.size)), greedy)
    capacity = int((greedy * arrays.unit + arrays.raw).max())
    max_offset = arrays.max_offset(capacity)
    peeled: list[np.ndarray] = []
    kept = _peel(arrays, Piece(ids=np.arange(arrays.n), base=0), max_offset, peeled)
    assert peeled
    offsets = np.full(arrays.n, -1, np.int64)
    offsets[kept] = greedy[kept]
    first_fit(arrays, np.concatenate(peeled[::-1]), offsets)
    assert (offsets <= max_offset).all()


def test_reduce_keeps_every_buffer_once() -> None:
    arrays = make_problem_arrays(planted(200, seed=3, density=0.9))
    reduced = reduce(arrays, arrays.max_offset(1024))
    parts = [p.ids for p in reduced.pieces]
    assert sorted(np.concatenate([*parts, reduced.bottom, reduced.fill]).tolist()) == list(range(arrays.n))


def test_promotion_stops_with_its_budget_and_improves_on_first_fit() -> None:
    arrays = make_problem_arrays(scattered(2_500, seed=1, mean_life=400))
    budget = WorkBudget(SolverLimits(work=800_000))
    goal = arrays.max_offset(lower_bound(arrays))
    ends = [int((offsets + arrays.size).max()) for offsets in squeaky_wheel.rounds(arrays, goal, budget)]
    assert budget.is_over
    assert min(ends) < ends[0]
    assert not list(squeaky_wheel.rounds(arrays, goal, WorkBudget(SolverLimits(seconds=0.001))))


@settings(max_examples=100)
@given(problem=problems(most=9), data=st.data())
def test_every_rule_of_the_search_decides_a_capacity_as_cpsat_does(problem: Problem, data: st.DataObject) -> None:
    arrays = make_problem_arrays(problem)
    if not arrays.n:
        return
    capacity = data.draw(st.integers(problem.max_live, solve(problem, solver="greedy").arena_size))
    max_offset = arrays.max_offset(capacity)
    if (max_offset < arrays.low).any():
        return
    expected, _ = cpsat_model.decide(arrays, max_offset, arrays.low, WorkBudget(SolverLimits(work=5_000_000)))
    assert expected is not PieceOutcome.LIMIT
    for rule in RULES:
        outcome, offsets = _searched(instance_of(arrays, max_offset), rule=rule)
        assert outcome is expected, rule
        if outcome is PieceOutcome.SOLVED:
            assert (offsets <= max_offset).all()
            _check(problem, arrays, offsets)


@settings(max_examples=100)
@given(seed=st.integers(0, 100_000), n=st.integers(4, 12), moved=st.booleans())
def test_what_is_placed_with_joins_is_valid(seed: int, n: int, moved: bool) -> None:
    problem = planted(n, seed=seed, height=24, steps=10, density=random.Random(seed).choice((1.0, 0.9)))
    if moved:  # sizes that change places may leave no placement within max live
        sizes = random.Random(seed).sample([b.size for b in problem.buffers], n)
        buffers = tuple(replace(b, size=size) for b, size in zip(problem.buffers, sizes, strict=True))
        problem = Problem(buffers=buffers)
    arrays = make_problem_arrays(problem)
    max_offset = arrays.max_offset(problem.max_live)
    piece = instance_of(arrays, max_offset)
    expected, _ = _searched(piece, rule=RULES[0])
    assert expected is not PieceOutcome.LIMIT
    for chance in (0.0, 0.7, 1.0):
        smaller = joined(piece, chance=chance, seed=seed)
        outcome, offsets = _searched(smaller.piece, rule=RULES[0])
        if chance == 0.0:
            assert outcome is expected
        if outcome is PieceOutcome.SOLVED:
            assert (smaller.expand(offsets) <= max_offset).all()
            _check(problem, arrays, smaller.expand(offsets))


def test_a_joined_piece_is_smaller_and_its_buffers_lie_in_one_another() -> None:
    rows = ((7, 0, 2), (7, 2, 4), (3, 4, 6), (4, 4, 6), (5, 0, 3), (5, 3, 6))
    problem = Problem(
        buffers=tuple(Buffer(id=f"b{i}", size=row[0], live=Interval(*row[1:])) for i, row in enumerate(rows))
    )
    arrays = make_problem_arrays(problem)
    piece = instance_of(arrays, arrays.max_offset(problem.max_live))
    smaller = joined(piece, chance=1.0)
    assert smaller.piece.arrays.n == 2
    assert smaller.group.tolist() == [0, 0, 0, 0, 1, 1]
    assert sorted(smaller.above.tolist()) in ([0, 0, 0, 0, 0, 3], [0, 0, 0, 0, 0, 4])
    assert joined(piece).piece.arrays.n == 6


def _searched(piece: Instance, *, rule: tuple[int, bool]) -> tuple[PieceOutcome, Ints]:
    outcome, _, offsets = search_once(
        piece, piece.arrays.size.astype(np.float64), rule=rule, nodes=1_000_000,
        table=np.zeros(1 << 10, np.int64), salt=1, budget=WorkBudget(SolverLimits(work=2_000_000)),
    )  # fmt: skip
    return outcome, offsets


def _check(problem: Problem, arrays: ProblemArrays, offsets: Ints) -> None:
    """`offsets` (units, by place in `arrays`) are a valid placement of `problem`."""
    placed = dict.fromkeys((b.id for b in problem.buffers), 0)
    placed |= {problem.buffers[i].id: int(at) * arrays.unit for i, at in zip(arrays.source, offsets, strict=True)}
    validate(problem, finish(problem, placed, solver="search", seconds=0.0))
