"""The heuristics and the pieces of the search, each against its definition."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances import planted
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
    make_problem_arrays,
)
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.tree_search import RULES, joined, search_once
from tests.solvers.small import arrays_of
from tests.strategies import problems

# -- squeaky-wheel optimization ------------------------------------------------------------------------------


@given(problem=problems(aligned=False), data=st.data())
def test_the_busiest_section_of_every_lifetime(problem: Problem, data: st.DataObject) -> None:
    arrays = make_problem_arrays(problem)
    if arrays.n:
        value = np.array(data.draw(st.lists(st.integers(0, 99), min_size=arrays.sections, max_size=arrays.sections)))
        expected = [value[lo:hi].max() for lo, hi in zip(arrays.lo, arrays.hi, strict=True)]
        assert squeaky_wheel._highest(value, arrays.lo, arrays.hi).tolist() == expected


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
