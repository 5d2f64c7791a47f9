"""Buffers that are joined to one before a piece is searched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solve.core import Core, Ints, load_of, sections_of
from memplan.solve.instance import Instance, instance_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A piece with fewer buffers; each buffer of the original lies in `group`, `above` its bottom (units)."""

    piece: Instance
    group: Ints
    above: Ints

    def expand(self, offsets: Ints) -> Ints:
        return offsets[self.group] + self.above


def unjoined(piece: Instance) -> Joined:
    """The piece as it is."""
    return Joined(piece=piece, group=np.arange(piece.core.n), above=np.zeros(piece.core.n, np.int64))


def joined(piece: Instance, *, loose: bool, chance: int = 1024, seed: int = 0) -> Joined | None:
    """None if nothing is joined."""
    from memplan.solve import join_kernel

    core, max_offset, n = piece.core, piece.max_offset, piece.core.n
    ceiling = max_offset + core.size
    free = ~core.pinned & (core.align == 1) & (np.diff(core.seg_ptr) == 1)
    up, delta, lo, hi, size, ceiling = join_kernel.join(
        core.size, core.lo, core.hi, core.seg_ptr, core.seg_lo, core.seg_hi, free, core.low, ceiling, load_of(core),
        int(ceiling.max() - core.low.min()), loose, chance, np.array([seed], np.int64),
    )  # fmt: skip
    kept = np.flatnonzero(up < 0)
    if len(kept) == n:
        return None
    top, above = np.arange(n), np.zeros(n, np.int64)
    while (up[top] >= 0).any():
        inside = up[top] >= 0
        above += np.where(inside, delta[top], 0)
        top = np.where(inside, up[top], top)
    place = np.empty(n, np.int64)
    place[kept] = np.arange(len(kept))
    counts = np.diff(core.seg_ptr)[kept]
    seg_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    segments = np.repeat(core.seg_ptr[kept] - seg_ptr[:-1], counts) + np.arange(seg_ptr[-1])
    alone = np.repeat(free[kept], counts)
    start = np.where(alone, np.repeat(lo[kept], counts), core.seg_lo[segments])
    end = np.where(alone, np.repeat(hi[kept], counts), core.seg_hi[segments])
    seg_lo, seg_hi, steps = sections_of(start, end)
    smaller = Core(
        unit=core.unit, size=size[kept], raw=size[kept] * core.unit, align=core.align[kept], low=core.low[kept],
        pinned=core.pinned[kept], seg_ptr=seg_ptr, seg_lo=seg_lo, seg_hi=seg_hi, lo=seg_lo[seg_ptr[:-1]],
        hi=seg_hi[seg_ptr[1:] - 1], steps=steps, start=core.start[kept], source=kept,
    )  # fmt: skip
    highest = ceiling[kept] - size[kept]
    highest = np.where(free[kept], highest, max_offset[kept])
    return Joined(piece=instance_of(smaller, highest), group=place[top], above=above)
