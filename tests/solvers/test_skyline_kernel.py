"""Placement on the skyline, and as an allocator would, against their definitions on small problems."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memplan.solvers import skyline_kernel
from memplan.solvers.arrays import Ints, ProblemArrays
from memplan.solvers.heuristics import on_skyline, online, unplaced
from tests.solvers.small import alive_together, small_cores


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


def test_wide_and_narrow_intervals_share_one_skyline() -> None:
    """A segment tree of up to 32 leaves, with intervals of every length in it."""
    for seed in range(25):
        chance = random.Random(seed)
        sections, n = chance.randint(2, 32), 40
        lo = [chance.randrange(sections) for _ in range(n)]
        hi = [chance.randint(a + 1, sections) for a in lo]
        size = [chance.randint(1, 9) for _ in range(n)]
        floor, expected = [0] * sections, []
        for a, b, height in zip(lo, hi, size, strict=True):
            expected.append(max(floor[a:b]))
            floor[a:b] = [expected[-1] + height] * (b - a)
        offsets = np.full(n, -1, np.int64)
        skyline_kernel.on_skyline(
            np.arange(n), np.array(size), np.ones(n, np.int64), np.zeros(n, np.int64), np.full(n, 10**6),
            np.arange(n + 1), np.array(lo), np.array(hi), sections, offsets,
        )  # fmt: skip
        assert offsets.tolist() == expected


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
