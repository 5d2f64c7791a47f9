"""Searching for an order within a target, forwards and backwards in time: `beam` and `exact` are its two uses."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, reverse, step_bytes
from memplan.schedule.search.search_kernel import EXHAUSTED, FOUND, levels

_USUAL = 64  # states: a search of this width costs the interpreter about as much as the other kernels


class SearchOutcome(enum.Enum):
    """What is known after a search."""

    FOUND = "an order within the target"
    EXHAUSTED = "no order keeps within the target: all were tried, but for those that cannot be better"
    GAVE_UP = "states were dropped, or the work ran out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`order` is of the core's ops, and within the target when FOUND; `work` is in units of the kernel, `dropped`
    the states that were too many for the width."""

    outcome: SearchOutcome
    order: Ints
    work: int
    dropped: int


def search(core: GraphArrays, target: int, *, width: int, limit: int, backwards: bool = False) -> Found:
    """Look for an order that needs at most `target` bytes at every step, keeping `width` states at a time.

    Deterministic: the work is counted, not timed. Backwards, the last op is decided first.
    """
    c = reverse(core) if backwards else core
    keys = np.random.default_rng(0).integers(1, 2**62, c.n)
    tables = (np.empty((2 * width, row), _numbers(c)) for row in (c.n, c.m, c.n))
    outcome, order, work, dropped = levels(
        *(max(c.n, c.n * width // _USUAL), target, width, limit, keys),
        *(*tables, c.pred_ptr, c.succ_ptr, c.succ, c.touch_ptr, c.touch, c.user_ptr),
        *(c.size, c.given, c.kept, c.backwards, c.chance_ptr, c.host, c.saved),
    )
    kind = {FOUND: SearchOutcome.FOUND, EXHAUSTED: SearchOutcome.EXHAUSTED}.get(int(outcome), SearchOutcome.GAVE_UP)
    return Found(
        outcome=kind, order=c.n - 1 - order[::-1] if backwards else order, work=int(work), dropped=int(dropped)
    )


def widest(core: GraphArrays, memory: int = 2**27) -> int:
    """The most states that a search may hold so that its tables stay within `memory` bytes."""
    each = 2 * (2 * core.n + core.m) * _numbers(core).itemsize + 8 * core.n
    return max(1, memory // (each + 1))


def _numbers(core: GraphArrays) -> np.dtype[np.signedinteger[Any]]:
    """Of what the tables are: ops by number, and counts of them."""
    return np.dtype(np.int16 if core.n < 2**15 - 1 else np.int32)


_NARROW = 64  # states
_FAR = 4  # times more states dropped in one direction of time than in the other: not worth a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """The best order found, its max live, a bound of all orders, and the work that is left; `dropped` are the
    states that the last search dropped, forwards and backwards in time."""

    order: Ints
    max_live: int
    bound: int
    left: int
    dropped: tuple[int, int] = (0, 0)


def unsearched(core: GraphArrays, order: Ints, bound: int, work: int) -> Narrowed:
    """Where a search begins."""
    peak = int(step_bytes(core, order).max(initial=0))
    return Narrowed(order=order, max_live=peak, bound=min(bound, peak), left=work)


def narrow(core: GraphArrays, best: Narrowed, *, width: int) -> Narrowed:
    """Search for ever better orders between the bound and the best, until they meet or the work is spent.

    One byte below the best as long as that succeeds, which ends it if all orders are excluded, and at the bound,
    which ends it if it succeeds: first where the search is narrow, as a wide one is likely to exclude all. A
    narrow one goes to the middle too: a lower target leaves fewer states to drop.
    """
    is_narrow = width <= _NARROW
    if is_narrow:
        best = _attempt(core, best, best.bound, width)
    before = best.max_live + 1
    while best.max_live < before:
        before = best.max_live
        best = _attempt(core, best, best.max_live - 1, width)
    return _attempt(core, best, (best.bound + best.max_live) // 2 if is_narrow else best.bound, width)


def _attempt(core: GraphArrays, best: Narrowed, target: int, width: int) -> Narrowed:
    """Search for `target` in both directions of time, first in the one that dropped less before; if there is need."""
    if not best.bound <= target < best.max_live or best.left <= 0:
        return best
    left, dropped = best.left, list(best.dropped)
    likely = dropped[1] < dropped[0]
    for backwards in (likely, not likely):
        if dropped[backwards] > _FAR * dropped[not backwards] > 0:
            continue
        found = search(core, target, width=width, limit=left, backwards=backwards)
        left -= found.work
        dropped[backwards] = found.dropped
        best = replace(best, left=left, dropped=(dropped[0], dropped[1]))
        if found.outcome is SearchOutcome.FOUND:
            return replace(best, order=found.order, max_live=int(step_bytes(core, found.order).max()))
        if found.outcome is SearchOutcome.EXHAUSTED:
            return replace(best, bound=max(best.bound, target + 1))
        if left <= 0:
            break
    return best
