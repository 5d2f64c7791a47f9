"""Solves a problem at one capacity, or proves that the capacity is too small. Steps 1 to 5 of the portfolio, in order.

It reduces the problem, places every remaining piece by a heuristic if that fits and by search otherwise, and then
places the peeled buffers. Each step is exact, so a piece that the search exhausts proves the capacity too small.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.heuristics import fill, first_answers, first_fit_work, on_skyline
from memplan.solvers.arrays.instance import PieceOutcome, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of, subset
from memplan.solvers.limits import WorkBudget
from memplan.solvers.search import cpsat_model
from memplan.solvers.search.eject import Learnt
from memplan.solvers.search.reduce import reduce
from memplan.solvers.search.squeaky_wheel import SqueakyWheel
from memplan.solvers.search.tree_search import search

_OVERHEAD = 300  # units of work of an attempt, in addition to three per buffer
_CORE_SHARE = 0.5  # share of the rest for one search of the core of a large piece


def attempt(
    arrays: ProblemArrays,
    max_offset: Ints,
    budget: WorkBudget,
    seed: int,
    *,
    hint: Ints | None = None,
    memory: dict[bytes, Learnt] | None = None,
    core: bool = False,
) -> tuple[PieceOutcome, Ints]:
    """Place every buffer of `arrays` at its `max_offset` (units) or below.

    The offsets are complete if SOLVED. At a LIMIT they may be too, without a negative one: a valid placement that is
    too high. With a `hint`, a placement that is too high, CP-SAT solves the pieces instead of the search. `memory`
    holds the state of the ejection search of earlier attempts on the same problem, by the buffers of a piece, and is
    updated. With it, ejection search starts at once. Pieces of a `core` are searched whole up to a larger size.
    """
    result = _attempt(arrays, max_offset, budget, seed, hint=hint, memory=memory, core=core)
    budget.spend(_OVERHEAD + 3 * arrays.n, 1)  # so that attempts without a search also end
    return result


def _attempt(
    arrays: ProblemArrays,
    max_offset: Ints,
    budget: WorkBudget,
    seed: int,
    *,
    hint: Ints | None,
    memory: dict[bytes, Learnt] | None,
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
        if hint is None:
            learnt = None
            if memory is not None:
                learnt = memory.setdefault(piece.ids.tobytes(), Learnt(np.full(part.n, -1, np.int64)))
            outcome, placed = _place(part, max_offset[piece.ids], budget, seed, learnt, core=core)
            if learnt is not None and outcome is PieceOutcome.SOLVED:
                learnt.offsets = placed.copy()
        else:
            outcome, placed = cpsat_model.decide(part, max_offset[piece.ids], hint[piece.ids], budget)
        if outcome is not PieceOutcome.SOLVED:
            if outcome is PieceOutcome.EXHAUSTED or not _is_complete(part, placed, hint):
                return outcome, offsets
            is_within = False
        offsets[piece.ids] = solved[content] = placed
    fill(arrays, reduced.fill, max_offset, offsets, budget)
    if not is_within or (offsets > max_offset).any():
        return PieceOutcome.LIMIT, offsets
    return PieceOutcome.SOLVED, offsets


def _is_complete(part: ProblemArrays, placed: Ints, hint: Ints | None) -> bool:
    """Whether a piece that was not placed within the capacity has a placement all the same."""
    return hint is None and part.n > thresholds.LARGE and bool((placed >= 0).all())


def _place(
    arrays: ProblemArrays, max_offset: Ints, budget: WorkBudget, seed: int, learnt: Learnt | None, *, core: bool
) -> tuple[PieceOutcome, Ints]:
    offsets = np.full(arrays.n, -1, np.int64)
    for offsets in islice(first_answers(arrays), thresholds.QUICK if arrays.n <= thresholds.LARGE else None):
        if (offsets <= max_offset).all():
            return PieceOutcome.SOLVED, offsets
    if arrays.n > (thresholds.CORE if core else thresholds.LARGE):
        return _place_large(arrays, max_offset, budget, seed, offsets)
    return search(instance_of(arrays, max_offset), budget, seed, learnt)


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
