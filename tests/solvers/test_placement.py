"""First-fit, best-fit, the skyline, an allocator, and solvers of one rule each, against their definitions."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import fit_kernel, solve
from memplan.solvers.arrays import Ints, ProblemArrays
from memplan.solvers.baselines import in_order, partitions
from memplan.solvers.heuristics import on_skyline, online, unplaced
from tests.solvers.small import alive_together, problem_of, small_cores, small_problem


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


def _placed(arrays: ProblemArrays, order: Ints, offsets: Ints, *, best: bool) -> list[int]:
    """The offsets of first-fit (best-fit: the least room, then the lowest) by the definition."""
    found: list[int] = offsets.tolist()
    for b in order.tolist():
        holes = _holes(arrays, b, found)
        found[b] = min(holes, key=lambda hole: (hole[1] if best else 0, hole[0]))[0]
    return found


def _both(arrays: ProblemArrays, order: Ints, start: Ints, policy: int) -> list[list[int]]:
    many, few = start.copy(), start.copy()
    rest = (arrays.size, arrays.align, arrays.low, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi)
    fit_kernel.fit(order, policy, *rest, arrays.sections, many)
    fit_kernel.fit_few(order, policy, *rest, few)
    return [many.tolist(), few.tolist()]


@pytest.mark.parametrize("policy", [fit_kernel.FIRST, fit_kernel.BEST])
def test_each_buffer_takes_the_first_or_the_tightest_free_offset(policy: int) -> None:
    for seed, arrays in small_cores(150, most=12, pins=True):
        lifted = replace(arrays, low=np.where(arrays.pinned, arrays.low, arrays.low + seed % 4))
        start = unplaced(lifted)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~arrays.pinned))
        expected = _placed(lifted, order, start, best=policy == fit_kernel.BEST)
        assert _both(lifted, order, start, policy) == [expected, expected], seed


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


def _offsets(solver: str, problem: Problem) -> list[int]:
    found = solve(problem, solver=solver).offsets
    return [found[b.id] for b in problem.buffers]


def _free_offset(b: Buffer, placed: list[tuple[int, Buffer]], *, best: bool) -> int:
    """The lowest, or tightest, aligned offset at which `b` overlaps nothing placed."""
    met = [(at, at + o.size) for at, o in placed if any(not s.is_disjoint(t) for s in b.segments for t in o.segments)]
    taken = {byte for low, high in met for byte in range(low, high)}
    found: list[tuple[int, int]] = []
    for at in range(max(taken, default=0) + b.alignment + 1):
        new = not found or any(byte in taken for byte in range(found[-1][1], at))
        if at % b.alignment == 0 and new and not any(byte in taken for byte in range(at, at + b.size)):
            room = min((byte for byte in taken if byte >= at), default=1 << 40) - at
            found.append((room if best else 0, at))
    return min(found)[1]


@pytest.mark.parametrize("best", [False, True])
def test_plain_python_places_in_order_at_the_first_or_tightest_free_offset(best: bool) -> None:
    for seed in range(150):
        problem = small_problem(seed, most=12, pins=True)
        order = sorted(problem.buffers, key=lambda b: (b.size * 7 + seed) % 10)
        found = in_order(problem, order, best=best, compiled=False)
        assert in_order(problem, order, best=best, compiled=True) == found
        placed = [(b.pinned_offset, b) for b in problem.buffers if b.pinned_offset is not None]
        for b in order:
            if b.pinned_offset is None:
                placed.append((_free_offset(b, placed, best=best), b))
        assert {b.id: at for at, b in placed} == found, seed


def test_weightless_buffers_lie_at_zero_or_at_their_pin() -> None:
    made = (
        Buffer(id="a", size=4, live=Interval(0, 2)),
        Buffer(id="none", size=0, live=Interval(0, 2)),
        Buffer(id="pin", size=0, live=Interval(0, 2), pinned_offset=64),
        Buffer(id="b", size=4, live=Interval(0, 2)),
    )
    problem = Problem(buffers=made)
    for compiled in (False, True):
        found = in_order(problem, problem.buffers, compiled=compiled)
        assert found == {"a": 0, "none": 0, "pin": 64, "b": 4}


def test_a_buffer_goes_into_the_fullest_partition_that_takes_it() -> None:
    problem = problem_of((9, 0, 2), (8, 0, 3), (7, 3, 4), (6, 2, 3), (5, 3, 5), (1, 4, 5), (1, 0, 9))
    found = [[b.id for b in members] for members in partitions(problem)]
    assert found == [["0", "2", "3", "5"], ["1", "4"], ["6"]]
    assert _offsets("partition", problem) == [0, 9, 0, 0, 9, 0, 17]
    gaps = Buffer(id="g", size=9, live=Interval(0, 6), gaps=(Interval(2, 4),))
    inside = Buffer(id="i", size=5, live=Interval(2, 4))
    assert len(partitions(Problem(buffers=(gaps, inside)))) == 1
    aligned = solve((Buffer(id="a", size=5, live=Interval(0, 1)),
                     Buffer(id="b", size=3, live=Interval(0, 1), alignment=4)), solver="partition")  # fmt: skip
    assert dict(aligned.offsets) == {"a": 0, "b": 8}
