"""Searches for an order within a target, forwards and backwards in time."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memplan.schedule.graph_arrays import GraphArrays, Ints, reverse, step_bytes
from memplan.schedule.search_kernel import EXHAUSTED, FOUND, levels

_USUAL = 64  # states: interpreted, a search of this width takes about as long as the other kernels


class SearchOutcome(enum.Enum):
    """The outcome of a search for an order within a target."""

    FOUND = "an order within the target"
    EXHAUSTED = "no order keeps within the target: all were tried, but for those that cannot be better"
    GAVE_UP = "states were dropped, or the work ran out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search: `order` is within the target if the outcome is FOUND.

    `work` is in units of the kernel; `dropped` is the number of states dropped because of the width.
    """

    outcome: SearchOutcome
    order: Ints
    work: int
    dropped: int


def search(arrays: GraphArrays, target: int, *, width: int, limit: int, backwards: bool = False) -> Found:
    """Look for an order that needs at most `target` bytes at every step, keeping `width` states at a time.

    Deterministic: the work is counted, not timed. Backwards, the last op is decided first.
    """
    c = reverse(arrays) if backwards else arrays
    keys = np.random.default_rng(0).integers(1, 2**62, c.n)
    tables = (np.empty((2 * width, row), _numbers(c)) for row in (c.n, c.m, c.n))
    outcome, order, work, dropped = levels(
        *(max(c.n, c.n * width // _USUAL), target, width, limit, keys),
        *(*tables, c.pred_ptr, c.succ_ptr, c.succ, c.touch_ptr, c.touch, c.user_ptr),
        *(c.size, c.given, c.kept, c.backwards, c.chance_ptr, c.donor, c.saved),
    )
    kind = {FOUND: SearchOutcome.FOUND, EXHAUSTED: SearchOutcome.EXHAUSTED}.get(int(outcome), SearchOutcome.GAVE_UP)
    return Found(
        outcome=kind, order=c.n - 1 - order[::-1] if backwards else order, work=int(work), dropped=int(dropped)
    )


def widest(arrays: GraphArrays, memory: int = 2**27) -> int:
    """Return the most states that a search may hold so that its tables stay within `memory` bytes."""
    each = 2 * (2 * arrays.n + arrays.m) * _numbers(arrays).itemsize + 8 * arrays.n
    return max(1, memory // (each + 1))


def _numbers(arrays: GraphArrays) -> np.dtype[np.signedinteger[Any]]:
    """Return the smallest integer type that holds op numbers and counts of ops, for the search's tables."""
    return np.dtype(np.int16 if arrays.n < 2**15 - 1 else np.int32)


_NARROW = 64  # states
_FAR = 4  # a direction of time that dropped this many times more states than the other is not searched


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """The best order so far, its max live and a lower bound over all orders, in bytes, and the work that is left.

    `dropped` are the numbers of states that the last searches dropped, forwards and backwards in time.
    """

    order: Ints
    max_live: int
    bound: int
    left: int
    dropped: tuple[int, int] = (0, 0)


def unsearched(arrays: GraphArrays, order: Ints, bound: int, work: int) -> Narrowed:
    """Return the state before the first search, with `order` as the best order so far."""
    peak = int(step_bytes(arrays, order).max(initial=0))
    return Narrowed(order=order, max_live=peak, bound=min(bound, peak), left=work)


def narrow(arrays: GraphArrays, best: Narrowed, *, width: int) -> Narrowed:
    """Search for better orders between the bound and the best order, until they meet or the work is spent.

    The targets are one byte below the best order, as long as that succeeds, and the bound itself: first for a narrow
    search, last for a wide one, which more likely excludes all orders. A narrow search ends with a target in the middle
    instead, because a lower target leaves fewer states to drop.
    """
    is_narrow = width <= _NARROW
    if is_narrow:
        best = _attempt(arrays, best, best.bound, width)
    before = best.max_live + 1
    while best.max_live < before:
        before = best.max_live
        best = _attempt(arrays, best, best.max_live - 1, width)
    return _attempt(arrays, best, (best.bound + best.max_live) // 2 if is_narrow else best.bound, width)


def _attempt(arrays: GraphArrays, best: Narrowed, target: int, width: int) -> Narrowed:
    """Search for an order within `target`, in both directions of time, first in the one that dropped fewer states.

    Returns `best` itself if the target is not between bound and best order, or no work is left.
    """
    if not best.bound <= target < best.max_live or best.left <= 0:
        return best
    left, dropped = best.left, list(best.dropped)
    likely = dropped[1] < dropped[0]
    for backwards in (likely, not likely):
        if dropped[backwards] > _FAR * dropped[not backwards] > 0:
            continue
        found = search(arrays, target, width=width, limit=left, backwards=backwards)
        left -= found.work
        dropped[backwards] = found.dropped
        best = replace(best, left=left, dropped=(dropped[0], dropped[1]))
        if found.outcome is SearchOutcome.FOUND:
            return replace(best, order=found.order, max_live=int(step_bytes(arrays, found.order).max()))
        if found.outcome is SearchOutcome.EXHAUSTED:
            return replace(best, bound=max(best.bound, target + 1))
        if left <= 0:
            break
    return best
