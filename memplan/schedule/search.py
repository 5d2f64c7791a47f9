"""Searching for an order within a target, forwards and backwards in time: `beam` and `exact` are its two uses."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np

from memplan.schedule.core import Core, Ints, reverse, step_bytes
from memplan.schedule.search_kernel import EXHAUSTED, FOUND, levels

_USUAL = 64  # states: a search of this width costs the interpreter about as much as the other kernels


class Outcome(enum.Enum):
    """What is known after a search."""

    FOUND = "an order within the target"
    EXHAUSTED = "no order keeps within the target: all were tried, but for those that cannot be better"
    GAVE_UP = "states were dropped, or the work ran out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """`order` is of the core's ops, and within the target when FOUND; `work` is in units of the kernel."""

    outcome: Outcome
    order: Ints
    work: int


def search(core: Core, target: int, *, width: int, limit: int, backwards: bool = False) -> Found:
    """Look for an order that needs at most `target` bytes at every step, keeping `width` states at a time.

    Deterministic: the work is counted, not timed. Backwards, the last op is decided first.
    """
    c = reverse(core) if backwards else core
    keys = np.random.default_rng(0).integers(1, 2**62, c.n)
    outcome, order, work = levels(
        *(
            max(c.n, c.n * width // _USUAL),
            target,
            width,
            limit,
            keys,
            c.pred_ptr,
            c.succ_ptr,
            c.succ,
            c.touch_ptr,
            c.touch,
            c.user_ptr,
        ),
        *(c.size, c.given, c.kept, c.backwards, c.chance_ptr, c.host, c.saved),
    )
    kind = {FOUND: Outcome.FOUND, EXHAUSTED: Outcome.EXHAUSTED}.get(int(outcome), Outcome.GAVE_UP)
    return Found(outcome=kind, order=c.n - 1 - order[::-1] if backwards else order, work=int(work))


def widest(core: Core, memory: int = 2**26) -> int:
    """The most states that a search may hold so that its tables stay within `memory` bytes."""
    return max(1, memory // (24 * core.n + 8 * core.m + 1))


_BETWEEN = (1, 2, 4, 6)  # eighths of the way from the bound to the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """The best order found, its max live, a bound of all orders, and the work that is left."""

    order: Ints
    max_live: int
    bound: int
    left: int


def narrow(core: Core, order: Ints, bound: int, *, width: int, work: int) -> Narrowed:
    """Search for ever better orders between `bound` and what `order` needs, until they meet or `work` is spent.

    First at the bound, which ends it if it succeeds; then one byte below the best as long as that succeeds,
    which ends it if all orders are excluded; at last, where states were dropped, at some targets in between
    (a lower target leaves fewer states to drop).
    """
    best = Narrowed(order=order, max_live=int(step_bytes(core, order).max(initial=0)), bound=bound, left=work)
    if best.max_live > bound:
        best = _attempt(core, best, bound, width)
    before = best.max_live + 1
    while best.bound < best.max_live < before and best.left > 0:
        before = best.max_live
        best = _attempt(core, best, best.max_live - 1, width)
    for eighths in _BETWEEN:
        target = best.bound + (best.max_live - best.bound) * eighths // 8
        if best.bound < target < best.max_live - 1 and best.left > 0:
            best = _attempt(core, best, target, width)
    return best


def _attempt(core: Core, best: Narrowed, target: int, width: int) -> Narrowed:
    """Search for `target`, forwards and then backwards in time."""
    left = best.left
    for backwards in (False, True):
        found = search(core, target, width=width, limit=left, backwards=backwards)
        left -= found.work
        if found.outcome is Outcome.FOUND:
            peak = int(step_bytes(core, found.order).max())
            return Narrowed(order=found.order, max_live=peak, bound=best.bound, left=left)
        if found.outcome is Outcome.EXHAUSTED:
            return replace(best, bound=max(best.bound, target + 1), left=left)
    return replace(best, left=left)
