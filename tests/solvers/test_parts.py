"""The pieces that the portfolio is made of, each against its own definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances import network
from memplan.core.problem import Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, solve
from memplan.solvers.arrays import (
    Instance,
    Ints,
    PieceOutcome,
    ProblemArrays,
    instance_of,
    make_problem_arrays,
)
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.heuristics import first_fit, unplaced
from memplan.solvers.solve_at_capacity import Piece, _peel
from memplan.solvers.tree_search import RULES, search_once
from tests.solvers.small import decide
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


@settings(max_examples=100)
@given(problem=problems(most=9), data=st.data())
def test_every_rule_of_the_search_decides_a_capacity(problem: Problem, data: st.DataObject) -> None:
    arrays = make_problem_arrays(problem)
    if not arrays.n:
        return
    capacity = data.draw(st.integers(problem.max_live, solve(problem, solver="greedy").arena_size))
    max_offset = arrays.max_offset(capacity)
    if (max_offset < arrays.low).any():
        return
    expected = decide(arrays, max_offset)
    for rule in RULES:
        outcome, offsets = _searched(instance_of(arrays, max_offset), rule=rule)
        assert outcome is expected, rule
        if outcome is PieceOutcome.SOLVED:
            assert (offsets <= max_offset).all()
            _check(problem, arrays, offsets)


def _searched(piece: Instance, *, rule: tuple[int, bool]) -> tuple[PieceOutcome, Ints]:
    outcome, _, offsets = search_once(
        piece, piece.arrays.size.astype(np.float64), rule=rule, nodes=1_000_000,
        table=np.zeros(1 << 10, np.int64), budget=WorkBudget(SolverLimits(work=2_000_000)),
    )  # fmt: skip
    return outcome, offsets


def _check(problem: Problem, arrays: ProblemArrays, offsets: Ints) -> None:
    """`offsets` (units, by place in `arrays`) are a valid placement of `problem`."""
    placed = dict.fromkeys((b.id for b in problem.buffers), 0)
    placed |= {problem.buffers[i].id: int(at) * arrays.unit for i, at in zip(arrays.source, offsets, strict=True)}
    validate(problem, finish(problem, placed, solver="search", seconds=0.0))
