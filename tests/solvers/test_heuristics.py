"""Placements by simple rules, and pairs alive together, against their definitions on small problems."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers.arrays import Ints, ProblemArrays, instance_of, make_problem_arrays, meets
from memplan.solvers.heuristics import first_fit, lowest_first, on_skyline, online, unplaced
from tests.solvers.small import alive_together, sections_of_buffer, small_cores


def _holes(arrays: ProblemArrays, b: int, offsets: list[int]) -> list[tuple[int, int]]:
    """(lowest aligned offset, room above it) of each free range that takes `b`, lowest first; the last has no end."""
    taken = {
        byte
        for c in range(arrays.n)
        if offsets[c] >= 0 and alive_together(arrays, b, c)
        for byte in range(offsets[c], offsets[c] + int(arrays.size[c]))
    }
    size, align, low = int(arrays.size[b]), int(arrays.align[b]), int(arrays.low[b])
    free = [at for at in range(max(taken, default=0) + low + size + align + 1) if at >= low and at not in taken]
    found: list[tuple[int, int]] = []
    for at in free:
        if (at % align == 0 and all(byte not in taken for byte in range(at, at + size))) and not any(
            first <= at < first + room for first, room in found
        ):
            above = [byte for byte in taken if byte >= at]
            found.append((at, min(above) - at if above else 1 << 40))
    return found


def _placed(arrays: ProblemArrays, order: Ints, offsets: Ints) -> list[int]:
    """The offsets of first-fit by the definition."""
    found: list[int] = offsets.tolist()
    for b in order.tolist():
        found[b] = _holes(arrays, b, found)[0][0]
    return found


def _fitted(arrays: ProblemArrays, order: Ints, start: Ints) -> list[int]:
    offsets = start.copy()
    first_fit(arrays, order, offsets)
    found: list[int] = offsets.tolist()
    return found


def test_each_buffer_takes_the_first_free_offset() -> None:
    for seed, arrays in small_cores(150, most=12, pins=True):
        lifted = replace(arrays, low=np.where(arrays.pinned, arrays.low, arrays.low + seed % 4))
        start = unplaced(lifted)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~arrays.pinned))
        assert _fitted(lifted, order, start) == _placed(lifted, order, start), seed


def test_neighbours_and_members_are_who_is_alive_together() -> None:
    for seed, arrays in small_cores(150):
        piece = instance_of(arrays, arrays.max_offset(100))
        for b in range(arrays.n):
            found = piece.adj[piece.adj_ptr[b] : piece.adj_ptr[b + 1]].tolist()
            assert sorted(found) == [c for c in range(arrays.n) if c != b and alive_together(arrays, b, c)], seed
        assert piece.adj_ptr[-1] == len(piece.adj)
        for s in range(arrays.sections):
            inside = piece.mem[piece.mem_ptr[s] : piece.mem_ptr[s + 1]].tolist()
            assert inside == [b for b in range(arrays.n) if s in sections_of_buffer(arrays, b)], seed
        assert piece.mem_ptr[-1] == len(piece.mem)


def test_hulls_that_overlap_without_a_common_section_are_not_alive_together() -> None:
    """All pairs of live intervals with at most one gap within five sections."""
    lives: list[tuple[tuple[int, int], ...]] = [((a, b),) for a, b in itertools.combinations(range(6), 2)]
    lives += [((a, b), (c, d)) for a, b, c, d in itertools.combinations(range(6), 4)]
    made = (
        Buffer(id=str(life), size=1, live=Interval(life[0][0], life[-1][1]), gaps=gaps)
        for life in lives
        for gaps in [tuple(Interval(a[1], b[0]) for a, b in itertools.pairwise(life))]
    )
    arrays = make_problem_arrays(Problem(buffers=tuple(made)))
    inside = [{s for a, b in life for s in range(a, b)} for life in lives]
    for b, mine in enumerate(inside):
        assert np.flatnonzero(meets(arrays, b)).tolist() == [c for c, other in enumerate(inside) if mine & other]


def _on_top(arrays: ProblemArrays, order: Ints, max_offset: Ints, offsets: Ints) -> list[int]:
    """The offsets if each buffer goes on top of all placed ones that it meets, where its highest offset allows it."""
    found: list[int] = offsets.tolist()
    for b in order.tolist():
        tops = [
            found[c] + int(arrays.size[c]) for c in range(arrays.n) if found[c] >= 0 and alive_together(arrays, b, c)
        ]
        top, align = max([int(arrays.low[b]), *tops]), int(arrays.align[b])
        at = (top + align - 1) // align * align
        found[b] = at if at <= max_offset[b] else -1
    return found


def test_each_buffer_goes_on_top_of_all_that_it_meets_or_is_refused() -> None:
    refusals = 0
    for seed, arrays in small_cores(200, most=12, pins=True):
        chance = random.Random(seed)
        lifted = replace(arrays, low=np.where(arrays.pinned, arrays.low, arrays.low + seed % 4))
        offsets = unplaced(lifted)
        free = np.flatnonzero(~arrays.pinned).tolist()
        order = np.array(chance.sample(free, len(free)), np.int64)
        max_offset = np.array([chance.randrange(25) for _ in range(arrays.n)], np.int64)
        expected = _on_top(lifted, order, max_offset, offsets)
        assert on_skyline(lifted, order, max_offset, offsets) == (-1 not in expected), seed
        assert offsets.tolist() == expected, seed
        refusals += expected.count(-1)
    assert refusals > 100


def _lowest_next(arrays: ProblemArrays, key: Ints) -> list[int]:
    """The offsets by the definition: each time, the buffer that can lie lowest on top of all that it meets."""
    found: list[int] = unplaced(arrays).tolist()
    highest = np.full(arrays.n, 1 << 40)
    while -1 in found:
        left = [b for b in range(arrays.n) if found[b] < 0]
        at = {b: _on_top(arrays, np.array([b]), highest, np.array(found))[b] for b in left}
        best = min(left, key=lambda b: (at[b], -key[b], arrays.lo[b], b))
        found[best] = at[best]
    return found


def test_the_lowest_buffer_is_placed_next() -> None:
    for seed, arrays in small_cores(150, most=12, pins=True):
        lifted = replace(arrays, low=np.where(arrays.pinned, arrays.low, arrays.low + seed % 4))
        key = np.random.default_rng(seed).integers(0, 4, arrays.n)
        assert lowest_first(lifted, key).tolist() == _lowest_next(lifted, key), seed


def _allocated(arrays: ProblemArrays, *, best: bool) -> list[int]:
    """The offsets of an allocator that knows only what is alive: largest first at equal births, gaps are not freed."""
    offsets = [-1] * arrays.n
    for b in sorted(range(arrays.n), key=lambda b: (arrays.start[b], -arrays.size[b])):
        alive = [c for c in range(arrays.n) if offsets[c] >= 0 and arrays.hi[c] > arrays.lo[b]]
        taken = sorted((offsets[c], offsets[c] + int(arrays.size[c])) for c in alive)
        ends = [0, *(end for _, end in taken)]
        starts = [*(start for start, _ in taken), 1 << 62]
        size, align, low = int(arrays.size[b]), int(arrays.align[b]), int(arrays.low[b])
        fitting = []
        for bottom, top in zip(ends, starts, strict=True):
            at = (max(bottom, low) + align - 1) // align * align
            if at + size <= top:
                fitting.append((top - at - size if best else 0, at))
        offsets[b] = min(fitting)[1]
    return offsets


@pytest.mark.parametrize("best", [False, True])
def test_an_allocator_takes_the_first_or_the_tightest_hole(best: bool) -> None:
    for seed, arrays in small_cores(400, most=16):
        lifted = replace(arrays, low=arrays.low + seed % 4)
        assert next(online(lifted, best)).tolist() == _allocated(lifted, best=best), seed
