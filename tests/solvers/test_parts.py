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
from memplan.solvers import SolverLimits, cpsat_model, solve, thresholds
from memplan.solvers import heuristics as squeaky_wheel
from memplan.solvers.arrays import (
    Instance,
    Ints,
    PieceOutcome,
    ProblemArrays,
    instance_of,
    load_of,
    lower_bound,
    make_problem_arrays,
    subset,
)
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.heuristics import fill, first_fit, online, pairs_alive_together, unplaced
from memplan.solvers.solve_at_capacity import Piece, _peel, reduce
from memplan.solvers.tree_search import RULES, joined, search_once
from tests.strategies import problems


@given(problem=problems(aligned=False))
def test_sections_keep_who_is_alive_together(problem: Problem) -> None:
    arrays = make_problem_arrays(problem)
    alive = [problem.buffers[i] for i in arrays.source.tolist()]
    assert (load_of(arrays).max(initial=0)) * arrays.unit == problem.max_live
    for section, step in enumerate(arrays.steps.tolist()):
        inside = {
            alive[b].id for b in range(arrays.n) if _is_in(arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi, b, section)
        }
        assert inside == {b.id for b in problem.alive_at(step) if b.size}


def _is_in(ptr: np.ndarray, lo: np.ndarray, hi: np.ndarray, b: int, section: int) -> bool:
    return any(lo[k] <= section < hi[k] for k in range(ptr[b], ptr[b + 1]))


@given(problem=problems(), best=st.booleans(), seed=st.integers(0, 9))
def test_few_buffers_are_placed_as_many_are(problem: Problem, best: bool, seed: int) -> None:
    arrays = make_problem_arrays(problem)
    order = np.random.default_rng(seed).permutation(np.flatnonzero(~arrays.pinned))
    found = []
    for few in (0, arrays.n):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thresholds, "FEW", few)
            found.append(unplaced(arrays))
            first_fit(arrays, order, found[-1], best=best)
    assert found[0].tolist() == found[1].tolist()


@given(problem=problems())
def test_the_bound_is_never_above_a_placement(problem: Problem) -> None:
    arrays = make_problem_arrays(problem)
    assert problem.max_live <= max(lower_bound(arrays), problem.max_live) <= solve(problem, solver="greedy").arena_size


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


def test_fill_reports_what_finds_no_room() -> None:
    made = tuple(Buffer(id=str(i), size=4, live=Interval(0, 2)) for i in range(3))
    arrays = make_problem_arrays(Problem(buffers=made))
    offsets = np.full(3, -1, np.int64)
    assert len(fill(arrays, np.arange(3), arrays.max_offset(8), offsets)) == 1


def test_subsets_have_sections_of_their_own() -> None:
    arrays = make_problem_arrays(planted(100, seed=1))
    part = subset(arrays, np.arange(0, 100, 10), base=7)
    assert part.n == 10
    assert part.sections < arrays.sections
    assert part.low.tolist() == [7] * 10


def test_the_allocator_gives_back_and_joins() -> None:
    made = [("a", 4, 0, 2), ("b", 4, 0, 2), ("c", 8, 2, 4), ("d", 2, 3, 5)]
    problem = Problem(buffers=tuple(Buffer(id=n, size=s, live=Interval(x, y)) for n, s, x, y in made))
    arrays = make_problem_arrays(problem)
    for best in (False, True):
        assert (next(online(arrays, best)) * arrays.unit).tolist() == [0, 4, 0, 8]
    assert pairs_alive_together(arrays) == 2


def test_budgets_count_inner_work_too() -> None:
    outer = WorkBudget(SolverLimits(work=1000))
    inner = outer.share(0.5)
    inner.spend(499, 10)
    assert inner.is_over
    assert outer.remaining_work() == 500
    assert outer.slice(10_000).nodes(10_000, 100) == 501
    assert WorkBudget(SolverLimits(seconds=0.0)).is_over


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
