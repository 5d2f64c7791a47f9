"""The pieces that the portfolio is made of, and reductions, each against its own definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances import network
from memplan.core.problem import Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, solve
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, ProblemArrays, instance_of, make_problem_arrays
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.heuristics import first_fit, unplaced
from memplan.solvers.solve_at_capacity import Piece, _peel
from memplan.solvers.tree_search import RULES, search_once
from tests.solvers.small import decide, small_problem
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


def _hulls_overlap(arrays: ProblemArrays, b: int, c: int) -> bool:
    return bool(arrays.lo[b] < arrays.hi[c] and arrays.lo[c] < arrays.hi[b])


def _always_fits(arrays: ProblemArrays, b: int, ids: list[int], base: int, highest: int) -> bool:
    """Whether the others rule out fewer offsets of `b` than there are, wherever they lie."""
    if arrays.pinned[b]:
        return False
    size, align = int(arrays.size[b]), int(arrays.align[b])
    near = [c for c in ids if c != b and _hulls_overlap(arrays, b, c)]
    # Each rules out size_c + size - 1 consecutive offsets, and of any `align` in a row one is a multiple.
    ruled_out = sum(int(arrays.size[c]) + size + align - 2 for c in near) // align
    return ruled_out < (highest - max(int(arrays.low[b]), base)) // align + 1


def test_buffers_that_always_fit_are_peeled_round_by_round() -> None:
    peeled_ever = 0
    for seed in range(200):
        problem = small_problem(seed, pins=True)
        arrays = make_problem_arrays(problem)
        base = seed % 3
        max_offset = arrays.max_offset(problem.max_live + arrays.unit * (seed % 9))
        ids = list(range(arrays.n))
        expected = []
        while True:
            free = [b for b in ids if _always_fits(arrays, b, ids, base, int(max_offset[b]))]
            if not free:
                break
            expected.append(sorted(free, key=lambda b: (-arrays.size[b], arrays.lo[b], b)))
            ids = [b for b in ids if b not in free]
        peeled: list[np.ndarray] = []
        kept = _peel(arrays, Piece(ids=np.arange(arrays.n), base=base), max_offset, peeled)
        assert kept.tolist() == ids, seed
        assert [round_.tolist() for round_ in peeled] == expected, seed
        peeled_ever += len(peeled)
    assert peeled_ever > 100
