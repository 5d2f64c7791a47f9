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
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, instance_of, load_of, subset
from memplan.solvers.base import WorkBudget
from memplan.solvers.heuristics import SqueakyWheel, fill, first_answers, first_fit_work, on_skyline
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
_CORE_SHARE = 0.5  # share of the rest for one search of the core of a large piece


def attempt(
    arrays: ProblemArrays,
    max_offset: Ints,
    budget: WorkBudget,
    seed: int,
    *,
    core: bool = False,
) -> tuple[PieceOutcome, Ints]:
    """Place every buffer of `arrays` at its `max_offset` (units) or below.

    The offsets are complete if SOLVED. At a LIMIT they may be too, without a negative one: a valid placement that is
    too high. Pieces of a `core` are searched whole up to a larger size.
    """
    result = _attempt(arrays, max_offset, budget, seed, core=core)
    budget.spend(_OVERHEAD + 3 * arrays.n, 1)  # so that attempts without a search also end
    return result


def _attempt(
    arrays: ProblemArrays,
    max_offset: Ints,
    budget: WorkBudget,
    seed: int,
    *,
    core: bool,
) -> tuple[PieceOutcome, Ints]:
    offsets = np.full(arrays.n, -1, np.int64)
    if (max_offset < arrays.low).any():
        return PieceOutcome.EXHAUSTED, offsets
    reduced = reduce(arrays, max_offset)
    offsets[reduced.bottom] = reduced.bottom_offset
    solved: dict[bytes, Ints] = {}
    is_within = True
    for piece in sorted(reduced.pieces, key=lambda p: len(p.ids)):
        part = subset(arrays, piece.ids, piece.base)
        content = part.content + max_offset[piece.ids].tobytes()
        if content in solved:  # repeated layers
            offsets[piece.ids] = solved[content]
            continue
        outcome, placed = _place(part, max_offset[piece.ids], budget, seed, core=core)
        if outcome is not PieceOutcome.SOLVED:
            if outcome is PieceOutcome.EXHAUSTED or part.n <= thresholds.LARGE or (placed < 0).any():
                return outcome, offsets  # else it has a placement all the same, which is too high
            is_within = False
        offsets[piece.ids] = solved[content] = placed
    fill(arrays, reduced.fill, max_offset, offsets, budget)
    if not is_within or (offsets > max_offset).any():
        return PieceOutcome.LIMIT, offsets
    return PieceOutcome.SOLVED, offsets


def _place(
    arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int, *, core: bool
) -> tuple[PieceOutcome, Ints]:
    offsets = np.full(arrays.n, -1, np.int64)
    for offsets in islice(first_answers(arrays), thresholds.QUICK if arrays.n <= thresholds.LARGE else None):
        if (offsets <= max_offset).all():
            return PieceOutcome.SOLVED, offsets
    if arrays.n > (thresholds.CORE if core else thresholds.LARGE):
        return _place_large(arrays, max_offset, budget, seed, offsets)
    return search(instance_of(arrays, max_offset), budget, seed)


def _place_large(
    arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int, known: Ints
) -> tuple[PieceOutcome, Ints]:
    """Search only the core, the buffers alive in tracked sections; place the others around it, and track the sections
    in which they overflow.

    At a limit, the lowest placement is returned; `known` is one.
    """
    load = load_of(arrays)
    wheel = SqueakyWheel(arrays, max_offset) if first_fit_work(arrays) <= thresholds.ROUND else None
    tracked = np.zeros(arrays.sections, np.bool_)
    tracked[np.argsort(-load, kind="stable")[: thresholds.TRACKED]] = True
    if wheel is None:
        _track_overflows(arrays, known, max_offset, load, tracked)
    while not budget.is_over:
        inside = _alive_in(arrays, tracked)
        if len(inside) == arrays.n:
            outcome, offsets = search(instance_of(arrays, max_offset), budget, seed)
            return outcome, known if outcome is PieceOutcome.LIMIT else offsets
        outcome, placed = attempt(
            subset(arrays, inside), max_offset[inside], budget.share(_CORE_SHARE), seed, core=True
        )
        if outcome is not PieceOutcome.SOLVED:
            return outcome, known
        offsets = np.full(arrays.n, -1, np.int64)
        offsets[inside] = placed
        offsets = _around(arrays, offsets, max_offset, wheel, budget)
        if (offsets <= max_offset).all():
            return PieceOutcome.SOLVED, offsets
        known = _lower(arrays, known, offsets)
        _track_overflows(arrays, offsets, max_offset, load, tracked)
    return PieceOutcome.LIMIT, known


def _around(
    arrays: ProblemArrays, core: Ints, max_offset: Ints, wheel: SqueakyWheel | None, budget: WorkBudget
) -> Ints:
    """Complete the offsets `core` (units, -1 for the others): on top of it if they fit there, else by first-fit."""
    rest = np.flatnonzero(core < 0)
    rest = rest[np.lexsort((arrays.lo[rest], -arrays.size[rest]))]
    offsets = core.copy()
    if wheel is None:
        fill(arrays, rest, max_offset, offsets, budget)
        return offsets
    if on_skyline(arrays, rest, max_offset, offsets):
        return offsets
    offsets = wheel.round(core, budget)
    for _ in range(thresholds.WHEEL - 1):
        if (offsets <= max_offset).all() or not wheel.has_time(budget):
            break
        offsets = _lower(arrays, wheel.round(core, budget), offsets)
    return offsets


def _lower(arrays: ProblemArrays, one: Ints, two: Ints) -> Ints:
    """The placement with the lower arena."""
    return one if (one + arrays.size).max() < (two + arrays.size).max() else two


def _alive_in(arrays: ProblemArrays, tracked: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Ints:
    """The buffers that are alive in a tracked section, and the pinned buffers."""
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(tracked, dtype=np.int64)))
    touches = np.add.reduceat(before[arrays.seg_hi] - before[arrays.seg_lo], arrays.seg_ptr[:-1]) > 0
    return np.flatnonzero(touches | arrays.pinned)


def _track_overflows(
    arrays: ProblemArrays,
    offsets: Ints,
    max_offset: Ints,
    load: Ints,
    tracked: np.ndarray[tuple[int], np.dtype[np.bool_]],
) -> None:
    """Track the section of largest load of each of the buffers that are furthest above their limit."""
    over = offsets - max_offset
    added = 0
    for b in np.argsort(-over, kind="stable"):
        if over[b] <= 0 or added == thresholds.ADDED:
            return
        busiest = int(arrays.lo[b] + load[arrays.lo[b] : arrays.hi[b]].argmax())
        added += not tracked[busiest]
        tracked[busiest] = True
