"""The pieces that the portfolio is made of, and reductions, each against its own definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances import network
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, solve
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, ProblemArrays, instance_of, make_problem_arrays
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.heuristics import first_fit, unplaced
from memplan.solvers.solve_at_capacity import Piece, _bottom, _peel, _split, reduce
from memplan.solvers.tree_search import RULES, search_once
from tests.solvers.small import arrays_of, decide, small_problem
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


def test_buffers_alive_with_all_others_are_stacked_at_the_bottom() -> None:
    arrays = arrays_of((3, 0, 9), (5, 0, 4), (2, 2, 5), (7, 5, 9), (4, 2, 8))
    bottoms: list[tuple[int, int]] = []
    kept, base, moved = _bottom(arrays, np.arange(5), 10, arrays.max_offset(40), bottoms)
    assert (kept.tolist(), base, moved) == ([1, 2, 3], 17, True)
    assert bottoms == [(0, 10), (4, 13)]
    kept, base, moved = _bottom(arrays, np.array([1, 3]), 6, arrays.max_offset(40), bottoms)
    assert (kept.tolist(), base, moved) == ([1, 3], 6, False)


def test_nothing_is_stacked_where_that_could_cost_room() -> None:
    def moved(arrays: ProblemArrays, *, spare: int = 0) -> bool:
        highest = arrays.max_offset(40)
        highest[0] += spare
        return _bottom(arrays, np.arange(arrays.n), 0, highest, [])[2]

    rows = ((3, 0, 9), (5, 0, 4), (7, 5, 9))
    assert moved(arrays_of(*rows))
    assert not moved(arrays_of(*rows), spare=1)  # the one at the bottom may end higher than those above it
    assert moved(arrays_of(*rows), spare=-1)
    changes: tuple[dict[str, Any], ...] = ({"alignment": 4}, {"pinned_offset": 4}, {"gaps": (Interval(2, 3),)})
    for change in changes:
        buffers = [Buffer(id="a", size=3, live=Interval(0, 9), **change)]
        buffers += [Buffer(id="b", size=5, live=Interval(0, 4)), Buffer(id="c", size=7, live=Interval(5, 9))]
        assert not moved(make_problem_arrays(Problem(buffers=tuple(buffers)))), change


def test_with_gaps_only_buffers_that_cover_all_others_are_stacked() -> None:
    """One with a gap is not in all sections of its hull, so a stacked one must cover the whole piece."""
    made = [
        Buffer(id="whole", size=3, live=Interval(0, 9)),
        Buffer(id="most", size=2, live=Interval(1, 9)),
        Buffer(id="gap", size=5, live=Interval(0, 8), gaps=(Interval(1, 6),)),
        Buffer(id="late", size=1, live=Interval(7, 9)),
    ]
    arrays = make_problem_arrays(Problem(buffers=tuple(made)))
    bottoms: list[tuple[int, int]] = []
    kept, base, moved = _bottom(arrays, np.arange(4), 0, arrays.max_offset(30), bottoms)
    assert (kept.tolist(), base, moved, bottoms) == ([1, 2, 3], 3, True, [(0, 0)])


def test_parts_share_no_hull_and_are_ascending() -> None:
    arrays = arrays_of((1, 4, 6), (1, 0, 2), (1, 1, 4), (1, 5, 7), (1, 8, 9), (1, 7, 9))
    assert [part.tolist() for part in _split(arrays, np.arange(6))] == [[1, 2], [0, 3], [4, 5]]
    assert [part.tolist() for part in _split(arrays, np.array([0, 1]))] == [[1], [0]]
    assert _split(arrays, np.zeros(0, np.int64)) == []


def test_reduction_by_hand() -> None:
    """Buffer 0 lies below all. Of the two parts above it, 5 lies below the second, 2 and then 3 below the first."""
    arrays = arrays_of((4, 0, 9), (6, 0, 3), (5, 1, 4), (6, 2, 5), (6, 3, 5), (8, 5, 9), (9, 5, 7), (9, 7, 9))
    reduced = reduce(arrays, arrays.max_offset(21))
    assert (reduced.bottom.tolist(), reduced.bottom_offset.tolist()) == ([0, 2, 3, 5], [0, 4, 9, 4])
    assert reduced.fill.tolist() == [7, 6, 4, 1]  # these find room wherever the others lie
    assert reduced.pieces == ()
    tight = reduce(arrays, arrays.max_offset(20))  # nothing always fits: all are stacked, the first part too high
    assert (tight.bottom.tolist(), tight.fill.tolist()) == ([0, 2, 3, 1, 4, 5, 6, 7], [])
    assert tight.bottom_offset.tolist() == [0, 4, 9, 15, 15, 4, 12, 12]


def test_pieces_that_cannot_be_reduced_keep_what_lies_below_them() -> None:
    """Two rings of three: in each, every two are alive together somewhere, and no one with both others at once."""
    ring = [(0, 5, 1, 4), (0, 3, 0, 0), (2, 5, 0, 0)]
    made = [Buffer(id="below", size=5, live=Interval(0, 20))]
    for shift in (0, 10):
        for i, (start, end, low, high) in enumerate(ring):
            gaps = (Interval(low + shift, high + shift),) if high else ()
            made.append(Buffer(id=f"{shift}.{i}", size=4 + i, live=Interval(start + shift, end + shift), gaps=gaps))
    arrays = make_problem_arrays(Problem(buffers=tuple(made)))
    reduced = reduce(arrays, arrays.max_offset(16))
    assert (reduced.bottom.tolist(), reduced.bottom_offset.tolist(), reduced.fill.tolist()) == ([0], [0], [])
    assert [(piece.ids.tolist(), piece.base) for piece in reduced.pieces] == [([1, 2, 3], 5), ([4, 5, 6], 5)]
