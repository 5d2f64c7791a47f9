"""First-fit, and the pairs alive together, against their definitions on small problems."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np

from memplan.solvers import fit_kernel
from memplan.solvers.arrays import Ints, ProblemArrays, instance_of
from memplan.solvers.heuristics import unplaced
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
    rest = (arrays.size, arrays.align, arrays.low, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi)
    fit_kernel.fit(order, *rest, offsets)
    found: list[int] = offsets.tolist()
    return found


def test_each_buffer_takes_the_first_free_offset() -> None:
    for seed, arrays in small_cores(150, most=12, pins=True):
        lifted = replace(arrays, low=np.where(arrays.pinned, arrays.low, arrays.low + seed % 4))
        start = unplaced(lifted)
        order = np.random.default_rng(seed).permutation(np.flatnonzero(~arrays.pinned))
        assert _fitted(lifted, order, start) == _placed(lifted, order, start), seed


def test_placed_buffers_are_met_in_any_order_of_their_offsets() -> None:
    """Some buffers are placed before the call, with overlaps: nothing says that they form a valid placement."""
    for seed, arrays in small_cores(100, most=12):
        chance = random.Random(seed)
        start = np.array([chance.choice((-1, chance.randrange(20))) for _ in range(arrays.n)], np.int64)
        order = np.flatnonzero(start < 0)
        assert _fitted(arrays, order, start) == _placed(arrays, order, start), seed


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
    ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum([len(life) for life in lives])))
    segments = np.array([segment for life in lives for segment in life], np.int64)
    lo, hi = segments[ptr[:-1], 0], segments[ptr[1:] - 1, 1]
    seg_lo, seg_hi = segments[:, 0].copy(), segments[:, 1].copy()
    by_start = np.argsort(lo, kind="stable")
    adj_ptr, adj = fit_kernel.neighbours(len(lives), ptr, seg_lo, seg_hi, lo, hi, by_start)
    inside = [{s for a, b in life for s in range(a, b)} for life in lives]
    for b, mine in enumerate(inside):
        expected = {c for c, other in enumerate(inside) if c != b and mine & other}
        assert set(adj[adj_ptr[b] : adj_ptr[b + 1]].tolist()) == expected
