"""Buffers that take each other's place, joined to one before a piece is searched.

Where something dies when something of its size is born, the newborn likely takes its place; and buffers that are
born together and die together likely lie side by side. Joined, they are one buffer. That shrinks a piece to half
and less, and a placement of what is left is found in a tenth to a hundredth of the time, if there is one: most joins
are guesses, so that such a piece proves nothing, and others are tried by turns, each join made or not by chance.

Some joins are certain, and a piece is searched with these in any case. At a boundary between two sections that
both fill the capacity, what is born takes exactly the bytes of what dies. So one that dies alone and one that is
born alone lie at one offset. And if the sizes of no part of those that die add up to those of a part of the born,
what dies lies without a gap, and so does what is born: of these, all that share both ends may lie in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.instance import Instance, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of, sections_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A piece with fewer buffers. Buffer b of the original lies in its `group[b]`, `above[b]` its bottom (units)."""

    piece: Instance
    group: Ints
    above: Ints

    def expand(self, offsets: Ints) -> Ints:
        """Offsets of the original from those of `piece` (units)."""
        return np.asarray(offsets[self.group] + self.above)


def unjoined(piece: Instance) -> Joined:
    """The piece as it is."""
    return Joined(piece=piece, group=np.arange(piece.core.n), above=np.zeros(piece.core.n, np.int64))


def joined(piece: Instance, *, chance: float = 0.0, seed: int = 0) -> Joined:
    """`piece` with the certain joins made, and each likely one with `chance` (0 to 1). n log n, about."""
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
    """Of each buffer the one that it lies in in the end, and how far above that one's bottom."""
    root, total = np.arange(len(up)), np.zeros(len(up), np.int64)
    while (inside := up[root] >= 0).any():
        total += np.where(inside, above[root], 0)
        root = np.where(inside, up[root], root)
    return root, total


def _kept(core: ProblemArrays, kept: Ints, lo: Ints, hi: Ints, size: Ints) -> ProblemArrays:
    """The buffers `kept`, with new hulls and sizes, which are full units. Those in segments keep them."""
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
