"""Solves a problem at one capacity, or proves that the capacity is too small. Steps 1 to 5 of the portfolio, in order.

It reduces the problem, places every remaining piece by a heuristic if that fits and by search otherwise, and then
places the peeled buffers. Each step is exact, so a piece that the search exhausts proves the capacity too small.

Three exact reductions are repeated on every piece until nothing changes (`reduce`):

- peel: a buffer b that always finds a free offset is placed last. Each buffer c that is alive together with b rules out
  at most size_c + size_b - 1 of its offsets, so it is enough if fewer than all offsets are ruled out;
- bottom: a buffer that is alive together with every other one of its piece is placed at the piece's bottom;
- split: parts of a piece that share no live interval become pieces of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, instance_of, subset
from memplan.solvers.base import WorkBudget
from memplan.solvers.heuristics import fill, first_answers, first_fit_work
from memplan.solvers.tree_search import search


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


def reduce(arrays: ProblemArrays, max_offset: Ints) -> Reduced:
    """Reduce `arrays` for a capacity given as the highest offset of each buffer (units). n log n per round."""
    done: list[Piece] = []
    bottoms: list[tuple[int, int]] = []
    peeled: list[Ints] = []
    todo = [Piece(ids=np.arange(arrays.n), base=0)]
    while todo:
        piece = todo.pop()
        kept = _peel(arrays, piece, max_offset, peeled)
        kept, base, moved = _bottom(arrays, kept, piece.base, max_offset, bottoms)
        parts = _split(arrays, kept)
        if len(parts) == 1 and not moved and len(kept) == len(piece.ids):
            done.append(piece)
        else:
            todo.extend(Piece(ids=part, base=base) for part in reversed(parts))
    fill = np.concatenate([np.zeros(0, np.int64), *reversed(peeled)])
    ids, offsets = np.array(bottoms, np.int64).reshape(-1, 2).T
    return Reduced(pieces=tuple(done), bottom=ids, bottom_offset=offsets, fill=fill)


def _peel(arrays: ProblemArrays, piece: Piece, max_offset: Ints, peeled: list[Ints]) -> Ints:
    """The buffers of `piece` that are left; the peeled ones are appended to `peeled`, larger ones first in a round."""
    ids = piece.ids
    while len(ids):
        free = _always_fits(arrays, ids, piece.base, max_offset)
        if not free.any():
            return ids
        chosen = ids[free]
        peeled.append(chosen[np.lexsort((arrays.lo[chosen], -arrays.size[chosen]))])
        ids = ids[~free]
    return ids


def _always_fits(
    arrays: ProblemArrays, ids: Ints, base: int, max_offset: Ints
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    lo, hi, size, align = arrays.lo[ids], arrays.hi[ids], arrays.size[ids], arrays.align[ids]
    first, width = int(lo.min()), int(hi.max() - lo.min())
    lo, hi = lo - first, hi - first
    # The buffers that overlap [lo, hi): all, less those that end before lo, less those that start at hi or later.
    count = _started(lo, hi, np.ones(len(ids), np.int64), width)
    total = _started(lo, hi, size, width) - size
    ruled_out = (total + (count - 1) * (size + align - 2)) // align
    offsets = (max_offset[ids] - np.maximum(arrays.low[ids], base)) // align + 1
    return (ruled_out < offsets) & ~arrays.pinned[ids]


def _started(lo: Ints, hi: Ints, value: Ints, width: int) -> Ints:
    """Return, for each interval, the sum of `value` over the intervals that overlap it, itself included."""
    starts, ends = np.zeros(width + 2, np.int64), np.zeros(width + 2, np.int64)
    np.add.at(starts, lo + 1, value)
    np.add.at(ends, hi + 1, value)
    return np.asarray(np.cumsum(starts)[hi] - np.cumsum(ends)[lo + 1])


def _bottom(
    arrays: ProblemArrays, ids: Ints, base: int, max_offset: Ints, bottoms: list[tuple[int, int]]
) -> tuple[Ints, int, bool]:
    """Stack the buffers that are alive together with all others of the piece on `base`.

    Returns the other buffers, their base, and whether any buffer was stacked.
    """
    if not len(ids) or arrays.pinned[ids].any() or (arrays.align[ids] > 1).any():
        return ids, base, False
    whole = (arrays.lo[ids] < arrays.hi[ids].min()) & (arrays.hi[ids] > arrays.lo[ids].max())
    if arrays.seg_lo.shape[0] != arrays.n:
        whole &= np.diff(arrays.seg_ptr)[ids] == 1
        whole &= (arrays.lo[ids] <= arrays.lo[ids].min()) & (arrays.hi[ids] >= arrays.hi[ids].max())
    # Moving b down lifts the buffers below it: valid unless b may end higher than they may (padding on top).
    ceiling = (max_offset + arrays.size)[ids]
    whole &= ceiling == ceiling.min()
    low = arrays.low[ids]  # above 0 if `arrays` is itself a piece above others
    if low.min() < low.max():
        return ids, base, False
    base = max(base, int(low[0]))
    for b in ids[whole]:
        bottoms.append((int(b), base))
        base += int(arrays.size[b])
    return ids[~whole], base, bool(whole.any())


def _split(arrays: ProblemArrays, ids: Ints) -> list[Ints]:
    """The parts of `ids`, by time, that no hull of a live interval connects."""
    if not len(ids):
        return []
    order = ids[np.argsort(arrays.lo[ids], kind="stable")]
    reach = np.maximum.accumulate(arrays.hi[order])
    cuts = np.flatnonzero(arrays.lo[order][1:] >= reach[:-1]) + 1
    return [np.sort(part) for part in np.split(order, cuts)]


_OVERHEAD = 300  # units of work of an attempt, in addition to three per buffer


def attempt(arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
    """Place every buffer of `arrays` at its `max_offset` (units) or below.

    The offsets are complete if SOLVED. At a LIMIT they may be too, without a negative one: a valid placement that is
    too high.
    """
    result = _attempt(arrays, max_offset, budget, seed)
    budget.spend(_OVERHEAD + 3 * arrays.n, 1)  # so that attempts without a search also end
    return result


def _attempt(arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
    offsets = np.full(arrays.n, -1, np.int64)
    if (max_offset < arrays.low).any():
        return PieceOutcome.EXHAUSTED, offsets
    reduced = reduce(arrays, max_offset)
    offsets[reduced.bottom] = reduced.bottom_offset
    solved: dict[bytes, Ints] = {}
    for piece in sorted(reduced.pieces, key=lambda p: len(p.ids)):
        part = subset(arrays, piece.ids, piece.base)
        content = part.content + max_offset[piece.ids].tobytes()
        if content in solved:  # repeated layers
            offsets[piece.ids] = solved[content]
            continue
        outcome, placed = _place(part, max_offset[piece.ids], budget, seed)
        if outcome is not PieceOutcome.SOLVED:
            return outcome, offsets
        offsets[piece.ids] = solved[content] = placed
    fill(arrays, reduced.fill, max_offset, offsets, budget)
    return PieceOutcome.LIMIT if (offsets > max_offset).any() else PieceOutcome.SOLVED, offsets


def _place(arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
    is_large = arrays.n > thresholds.LARGE
    for offsets in islice(first_answers(arrays), None if is_large else thresholds.QUICK):
        if (offsets <= max_offset).all():
            return PieceOutcome.SOLVED, offsets
        if is_large:
            budget.spend(first_fit_work(arrays), 1)
    if is_large:  # a training step of that size is placed by heuristics
        return PieceOutcome.LARGE, np.full(arrays.n, -1, np.int64)
    return search(instance_of(arrays, max_offset), budget, seed)
