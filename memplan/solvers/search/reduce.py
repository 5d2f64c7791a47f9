"""Step 1 of the portfolio: removes buffers that need no search under a capacity, and splits the rest into pieces.

Three exact reductions are repeated on every piece until nothing changes:

- peel: a buffer b that always finds a free offset is placed last. Each buffer c that is alive together with b rules out
  at most size_c + size_b - 1 of its offsets, so it is enough if fewer than all offsets are ruled out;
- bottom: a buffer that is alive together with every other one of its piece is placed at the piece's bottom;
- split: parts of a piece that share no live interval become pieces of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Buffers (ascending indices) that must be searched together, at `base` units or above."""

    ids: Ints
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The pieces to search, the buffers placed at a bottom with their offsets (units), and the peeled buffers in the
    order in which they are placed afterwards."""

    pieces: tuple[Piece, ...]
    bottom: Ints
    bottom_offset: Ints
    fill: Ints


def reduce(core: ProblemArrays, max_offset: Ints) -> Reduced:
    """Reduce `core` for a capacity given as the highest offset of each buffer (units). n log n per round."""
    done: list[Piece] = []
    bottoms: list[tuple[int, int]] = []
    peeled: list[Ints] = []
    todo = [Piece(ids=np.arange(core.n), base=0)]
    while todo:
        piece = todo.pop()
        kept = _peel(core, piece, max_offset, peeled)
        kept, base, moved = _bottom(core, kept, piece.base, max_offset, bottoms)
        parts = _split(core, kept)
        if len(parts) == 1 and not moved and len(kept) == len(piece.ids):
            done.append(piece)
        else:
            todo.extend(Piece(ids=part, base=base) for part in reversed(parts))
    fill = np.concatenate([np.zeros(0, np.int64), *reversed(peeled)])
    ids, offsets = np.array(bottoms, np.int64).reshape(-1, 2).T
    return Reduced(pieces=tuple(done), bottom=ids, bottom_offset=offsets, fill=fill)


def _peel(core: ProblemArrays, piece: Piece, max_offset: Ints, peeled: list[Ints]) -> Ints:
    """The buffers of `piece` that are left; the peeled ones are appended to `peeled`, larger ones first in a round."""
    ids = piece.ids
    while len(ids):
        free = _always_fits(core, ids, piece.base, max_offset)
        if not free.any():
            return ids
        chosen = ids[free]
        peeled.append(chosen[np.lexsort((core.lo[chosen], -core.size[chosen]))])
        ids = ids[~free]
    return ids


def _always_fits(
    core: ProblemArrays, ids: Ints, base: int, max_offset: Ints
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    lo, hi, size, align = core.lo[ids], core.hi[ids], core.size[ids], core.align[ids]
    first, width = int(lo.min()), int(hi.max() - lo.min())
    lo, hi = lo - first, hi - first
    # The buffers that overlap [lo, hi): all, less those that end before lo, less those that start at hi or later.
    count = _started(lo, hi, np.ones(len(ids), np.int64), width)
    total = _started(lo, hi, size, width) - size
    ruled_out = (total + (count - 1) * (size + align - 2)) // align
    offsets = (max_offset[ids] - np.maximum(core.low[ids], base)) // align + 1
    return (ruled_out < offsets) & ~core.pinned[ids]


def _started(lo: Ints, hi: Ints, value: Ints, width: int) -> Ints:
    """Return, for each interval, the sum of `value` over the intervals that overlap it, itself included."""
    starts, ends = np.zeros(width + 2, np.int64), np.zeros(width + 2, np.int64)
    np.add.at(starts, lo + 1, value)
    np.add.at(ends, hi + 1, value)
    return np.asarray(np.cumsum(starts)[hi] - np.cumsum(ends)[lo + 1])


def _bottom(
    core: ProblemArrays, ids: Ints, base: int, max_offset: Ints, bottoms: list[tuple[int, int]]
) -> tuple[Ints, int, bool]:
    """Stack the buffers that are alive together with all others of the piece on `base`.

    Returns the other buffers, their base, and whether any buffer was stacked.
    """
    if not len(ids) or core.pinned[ids].any() or (core.align[ids] > 1).any():
        return ids, base, False
    whole = (core.lo[ids] < core.hi[ids].min()) & (core.hi[ids] > core.lo[ids].max())
    if core.seg_lo.shape[0] != core.n:
        whole &= np.diff(core.seg_ptr)[ids] == 1
        whole &= (core.lo[ids] <= core.lo[ids].min()) & (core.hi[ids] >= core.hi[ids].max())
    # Moving b down lifts the buffers below it: valid unless b may end higher than they may (padding on top).
    ceiling = (max_offset + core.size)[ids]
    whole &= ceiling == ceiling.min()
    low = core.low[ids]  # above 0 if `core` is itself a piece above others
    if low.min() < low.max():
        return ids, base, False
    base = max(base, int(low[0]))
    for b in ids[whole]:
        bottoms.append((int(b), base))
        base += int(core.size[b])
    return ids[~whole], base, bool(whole.any())


def _split(core: ProblemArrays, ids: Ints) -> list[Ints]:
    """The parts of `ids`, by time, that no hull of a live interval connects."""
    if not len(ids):
        return []
    order = ids[np.argsort(core.lo[ids], kind="stable")]
    reach = np.maximum.accumulate(core.hi[order])
    cuts = np.flatnonzero(core.lo[order][1:] >= reach[:-1]) + 1
    return [np.sort(part) for part in np.split(order, cuts)]
