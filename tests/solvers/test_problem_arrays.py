"""Units, sections, limits, bounds and reductions of the arrays, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import arrays as problem_arrays
from memplan.solvers import solve, thresholds
from memplan.solvers.arrays import lower_bound, make_problem_arrays
from memplan.solvers.solve_at_capacity import _bottom
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


def test_buffers_alive_with_all_others_are_stacked_at_the_bottom() -> None:
    arrays = arrays_of((3, 0, 9), (5, 0, 4), (2, 2, 5), (7, 5, 9), (4, 2, 8))
    bottoms: list[tuple[int, int]] = []
    kept, base, moved = _bottom(arrays, np.arange(5), 10, arrays.max_offset(40), bottoms)
    assert (kept.tolist(), base, moved) == ([1, 2, 3], 17, True)
    assert bottoms == [(0, 10), (4, 13)]
    kept, base, moved = _bottom(arrays, np.array([1, 3]), 6, arrays.max_offset(40), bottoms)
    assert (kept.tolist(), base, moved) == ([1, 3], 6, False)
