"""Units, sections and limits of the arrays, against their definitions."""

from __future__ import annotations

import math

import numpy as np

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import arrays as problem_arrays
from memplan.solvers.arrays import load_of, make_problem_arrays, subset
from tests.solvers.small import alive_together, sections_of_buffer, small_problem


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
        arrays = make_problem_arrays(problem)
        inside = [{b for b in range(arrays.n) if s in sections_of_buffer(arrays, b)} for s in range(arrays.sections)]
        alive = [{i for i, b in enumerate(problem.buffers) if _is_alive(b, step)} for step in arrays.steps.tolist()]
        assert inside == alive, seed
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


def test_steps_far_from_zero_and_far_apart() -> None:
    problem = Problem(buffers=(_buffer("a", 1, -50, 10**9), _buffer("b", 1, 7, 8), _buffer("c", 1, 10**8, 10**9)))
    arrays = make_problem_arrays(problem)
    assert (arrays.lo.tolist(), arrays.hi.tolist(), arrays.steps.tolist()) == ([0, 0, 1], [2, 1, 2], [7, 10**8])
    assert arrays.start.tolist() == [-50, 7, 10**8]
    near = make_problem_arrays(Problem(buffers=(_buffer("a", 1, -5, -2), _buffer("b", 1, -4, -3))))
    assert (near.lo.tolist(), near.hi.tolist(), near.steps.tolist()) == ([0, 0], [1, 1], [-4])


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
