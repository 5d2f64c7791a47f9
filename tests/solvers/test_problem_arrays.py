"""Units, sections, limits, bounds and reductions of the arrays, against their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import arrays as problem_arrays
from memplan.solvers import solve, thresholds
from memplan.solvers.arrays import ProblemArrays, load_of, lower_bound, make_problem_arrays, subset
from memplan.solvers.solve_at_capacity import Piece, _bottom, _peel, _split, reduce
from tests.solvers.small import alive_together, arrays_of, sections_of_buffer, small_problem
from tests.strategies import layered_problems


def _buffer(name: str, size: int, start: int, end: int, *, alignment: int = 1, pin: int | None = None) -> Buffer:
    return Buffer(id=name, size=size, live=Interval(start, end), alignment=alignment, pinned_offset=pin)


def test_every_quantity_is_a_multiple_of_the_unit_and_the_unit_is_the_largest_such() -> None:
    for seed in range(150):
        problem = small_problem(seed, pins=True)
        arrays = make_problem_arrays(problem)
        shared = math.gcd(*(b.alignment for b in problem.buffers))
        rounded = [math.ceil(b.size / shared) * shared for b in problem.buffers]
        pins = [b.pinned_offset or 0 for b in problem.buffers]
        unit = math.gcd(*rounded, *pins)
        for alignment in sorted({b.alignment for b in problem.buffers}):
            unit = unit if unit % alignment == 0 else math.gcd(unit, alignment)
        assert arrays.unit == unit, seed
        assert (arrays.size * unit).tolist() == rounded
        assert arrays.raw.tolist() == [b.size for b in problem.buffers]
        assert (arrays.low * unit).tolist() == pins
        assert arrays.pinned.tolist() == [b.pinned_offset is not None for b in problem.buffers]
        for b, align in zip(problem.buffers, arrays.align.tolist(), strict=True):
            multiples = {at for at in range(0, 64, unit) if at % b.alignment == 0}
            assert multiples == set(range(0, 64, align * unit)), seed


def test_units_by_hand() -> None:
    arrays = make_problem_arrays(
        Problem(buffers=(_buffer("a", 100, 0, 2, alignment=64), _buffer("b", 200, 1, 3, alignment=64)))
    )
    assert (arrays.unit, arrays.size.tolist(), arrays.align.tolist()) == (128, [1, 2], [1, 1])
    assert (arrays.max_offset(328).tolist(), arrays.max_offset(327).tolist()) == ([1, 1], [1, 0])
    assert (arrays.max_offset(99).tolist(), arrays.ceiling(328), arrays.ceiling(327)) == ([-1, -1], 3, 2)
    mixed = make_problem_arrays(Problem(buffers=(_buffer("a", 6, 0, 2), _buffer("b", 12, 1, 3, alignment=4))))
    assert (mixed.unit, mixed.size.tolist(), mixed.align.tolist()) == (2, [3, 6], [1, 2])
    pinned = make_problem_arrays(Problem(buffers=(_buffer("a", 6, 0, 2, pin=9), _buffer("b", 12, 1, 3))))
    assert (pinned.unit, pinned.low.tolist()) == (3, [3, 0])
    assert pinned.max_offset(15).tolist() == [3, 1]
    assert pinned.max_offset(14).tolist() == [-1, 0]


def test_the_highest_offset_ends_within_the_capacity() -> None:
    for seed in range(100):
        problem = small_problem(seed, pins=True)
        arrays = make_problem_arrays(problem)
        for capacity in (0, 5, 9, 16, 23):
            for b, found in zip(problem.buffers, arrays.max_offset(capacity).tolist(), strict=True):
                offsets = range(0, 64, arrays.unit) if b.pinned_offset is None else [b.pinned_offset]
                fitting = [at // arrays.unit for at in offsets if at % b.alignment == 0 and at + b.size <= capacity]
                assert (found if found >= 0 else None) == max(fitting, default=None), (seed, capacity)


def test_there_is_one_section_for_every_largest_set_of_buffers_alive_together() -> None:
    for seed in range(150):
        problem = small_problem(seed)
        sets = []
        for each in (0, 100):  # by sorting, and by a table of all steps
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(thresholds, "STEPS_EACH", each)
                arrays = make_problem_arrays(problem)
            inside = [
                {b for b in range(arrays.n) if s in sections_of_buffer(arrays, b)} for s in range(arrays.sections)
            ]
            alive = [{i for i, b in enumerate(problem.buffers) if _is_alive(b, step)} for step in arrays.steps.tolist()]
            assert inside == alive, seed
            sets.append((inside, arrays.steps.tolist(), arrays.lo.tolist(), arrays.hi.tolist()))
        assert sets[0] == sets[1], seed
        for one in range(arrays.n):
            for two in range(one):
                together = any(
                    _is_alive(problem.buffers[one], s) and _is_alive(problem.buffers[two], s) for s in range(12)
                )
                assert alive_together(arrays, one, two) == together  # fmt: skip
        deaths = {segment.end for b in problem.buffers for segment in b.segments}
        births = {segment.start for b in problem.buffers for segment in b.segments}
        expected = sum(any(max((d for d in deaths if d < e), default=-1) <= s < e for s in births) for e in deaths)
        assert arrays.sections == expected, seed


def _is_alive(b: Buffer, step: int) -> bool:
    return any(segment.start <= step < segment.end for segment in b.segments)


def test_a_subset_is_the_problem_of_its_buffers_alone() -> None:
    for seed in range(80):
        problem = small_problem(seed, most=12, pins=True)
        arrays = make_problem_arrays(problem)
        ids = np.arange(seed % 2, arrays.n, 2)
        if not len(ids):
            continue
        part = subset(arrays, ids, base=seed % 7)
        assert (part.n, part.unit, part.source.tolist()) == (len(ids), arrays.unit, ids.tolist())
        for column in ("size", "raw", "align", "pinned", "start"):
            assert getattr(part, column).tolist() == getattr(arrays, column)[ids].tolist()
        for k, b in enumerate(ids.tolist()):
            multiples = [at for at in range(64) if at % arrays.align[b] == 0 and at >= max(seed % 7, arrays.low[b])]
            assert part.low[k] == (max(arrays.low[b], seed % 7) if arrays.low[b] >= seed % 7 else multiples[0])
            assert (part.lo[k], part.hi[k]) == (min(sections_of_buffer(part, k)), max(sections_of_buffer(part, k)) + 1)
            for m, c in enumerate(ids.tolist()):
                assert alive_together(part, k, m) == alive_together(arrays, b, c), seed
        alone = make_problem_arrays(Problem(buffers=tuple(problem.buffers[b] for b in ids.tolist())))
        assert part.sections == alone.sections
        assert load_of(part).max() * part.unit <= load_of(arrays).max() * arrays.unit
        for s, step in enumerate(part.steps.tolist()):
            alive = {k for k, b in enumerate(ids.tolist()) if _is_alive(problem.buffers[b], step)}
            assert alive == {k for k in range(part.n) if s in sections_of_buffer(part, k)}


def test_empty_and_weightless_buffers_have_no_arrays() -> None:
    arrays = make_problem_arrays(Problem(buffers=(_buffer("a", 0, 0, 2), _buffer("b", 5, 1, 3), _buffer("c", 0, 1, 2))))
    assert (arrays.n, arrays.source.tolist(), arrays.unit) == (1, [1], 5)
    empty = make_problem_arrays(Problem(buffers=()))
    assert (empty.n, empty.sections, empty.unit, empty.ceiling(9)) == (0, 0, 1, 0)
    assert problem_arrays.sections_of(empty.lo, empty.hi)[0].tolist() == []


def _bound(*rows: tuple[int, int, int], alignment: int = 64, pin: int | None = None) -> int:
    """The bound of buffers (size, start, end); the last one is pinned."""
    made = [
        Buffer(id=str(i), size=size, live=Interval(start, end), alignment=alignment,
               pinned_offset=pin if i == len(rows) - 1 else None)
        for i, (size, start, end) in enumerate(rows)
    ]  # fmt: skip
    return lower_bound(make_problem_arrays(Problem(buffers=tuple(made))))


def test_padding_counts_but_for_the_topmost_buffer_of_each_section() -> None:
    assert _bound((33, 0, 2), (33, 0, 2), (33, 0, 2)) == 64 + 64 + 33
    assert _bound((33, 0, 2), (60, 0, 2)) == 64 + 33  # the one with the most padding on top
    # 256 bytes without padding in one section, 200 with much of it in another: the first counts whole.
    assert _bound((256, 0, 2), (200, 3, 5)) == 256
    assert _bound((128, 0, 2), (128, 0, 2), (130, 3, 5)) == 256
    assert _bound((33, 0, 5), (33, 0, 5), (64, 2, 3)) == 64 + 64 + 33
    assert _bound((7, 0, 2), (9, 1, 3), alignment=1) == 16


def test_no_arena_ends_below_a_pinned_or_a_large_buffer() -> None:
    assert _bound((8, 0, 1), (8, 5, 6), pin=640) == 648
    assert _bound((65, 0, 1), alignment=64) == 65


@given(problem=layered_problems(most=6))
def test_it_is_never_above_what_the_exact_solver_needs(problem: Problem) -> None:
    exact = solve(problem, solver="cpsat", work_limit=2_000_000).arena_size
    bound = lower_bound(make_problem_arrays(problem))
    assert bound <= exact
    if all(b.alignment == 1 for b in problem.buffers):
        assert bound >= problem.max_live


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
