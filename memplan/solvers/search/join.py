"""Joins buffers that likely share an offset or are adjacent into one buffer, before a piece is searched.

If one buffer ends at the step at which another of the same size starts, the second likely takes the offset of the
first. Buffers that start together and end together are likely adjacent. Joined buffers are searched as one. That
reduces a piece to half its buffers or fewer, and a placement of it, if there is one, is found in a tenth to a hundredth
of the time. Most joins are guesses, so an exhausted search with them proves nothing; variants are tried in turn, with
each likely join made at random.

Some joins are certain, and are always made. At a boundary between two sections that both fill the capacity, the buffers
that start take exactly the bytes of those that end. So if one buffer ends there and one starts there, they have equal
offsets. And if no proper subset of those that end has the same total size as one of those that start, then the buffers
that end are contiguous, and so are those that start; those of them that share both ends may be in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.instance import Instance, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of, sections_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A piece with joined buffers: buffer b of the original is in `group[b]`, `above[b]` units above its bottom."""

    piece: Instance
    group: Ints
    above: Ints

    def expand(self, offsets: Ints) -> Ints:
        """The offsets of the original buffers for the offsets of `piece` (units)."""
        return np.asarray(offsets[self.group] + self.above)


def unjoined(piece: Instance) -> Joined:
    """`piece` without any join."""
    return Joined(piece=piece, group=np.arange(piece.core.n), above=np.zeros(piece.core.n, np.int64))


def joined(piece: Instance, *, chance: float = 0.0, seed: int = 0) -> Joined:
    """`piece` with all certain joins, and with each likely one at the probability `chance` (0 to 1). About n log n."""
    from memplan.solvers.search import join_kernel as kernel

    core = piece.core
    free = ~core.pinned & (core.align == 1) & (np.diff(core.seg_ptr) == 1)
    ceiling = piece.max_offset + core.size
    up, above, lo, hi, size, ceiling = kernel.join(
        core.size, core.lo, core.hi, core.seg_ptr, core.seg_lo, core.seg_hi, free, core.low, ceiling, load_of(core),
        int(ceiling.max() - core.low.min()), chance > 0.0, round(chance * kernel.CERTAIN), seed,
        thresholds.BLOCK,
    )  # fmt: skip
    kept = np.flatnonzero(up < 0)
    if len(kept) == core.n:
        return unjoined(piece)
    group, above = _roots(up, above)
    place = np.zeros(core.n, np.int64)
    place[kept] = np.arange(len(kept))
    smaller = _kept(core, kept, lo, hi, size)
    return Joined(piece=instance_of(smaller, (ceiling - size)[kept]), group=place[group], above=above)


def _roots(up: Ints, above: Ints) -> tuple[Ints, Ints]:
    """Return, for each buffer, the remaining buffer that contains it, and how far above that one's bottom it is."""
    root, total = np.arange(len(up)), np.zeros(len(up), np.int64)
    while (inside := up[root] >= 0).any():
        total += np.where(inside, above[root], 0)
        root = np.where(inside, up[root], root)
    return root, total


def _kept(core: ProblemArrays, kept: Ints, lo: Ints, hi: Ints, size: Ints) -> ProblemArrays:
    """The arrays of the buffers `kept`, with new hulls, and sizes in full units. Buffers with gaps keep their gaps."""
    counts = np.diff(core.seg_ptr)[kept]
    seg_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    segments = np.repeat(core.seg_ptr[kept] - seg_ptr[:-1], counts) + np.arange(seg_ptr[-1])
    start, end = core.seg_lo[segments], core.seg_hi[segments]
    start[seg_ptr[:-1]], end[seg_ptr[1:] - 1] = lo[kept], hi[kept]
    seg_lo, seg_hi, steps = sections_of(start, end)
    return ProblemArrays(
        unit=core.unit, size=size[kept], raw=size[kept] * core.unit, align=core.align[kept], low=core.low[kept],
        pinned=core.pinned[kept], seg_ptr=seg_ptr, seg_lo=seg_lo, seg_hi=seg_hi, lo=seg_lo[seg_ptr[:-1]],
        hi=seg_hi[seg_ptr[1:] - 1], steps=core.steps[steps], start=core.start[kept], source=kept,
    )  # fmt: skip
