"""Searching for an order within a target, forwards and backwards in time: `beam` and `exact` are its two uses."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from memplan.schedule.core import Core, Ints, reverse, step_bytes
from memplan.schedule.search_kernel import EXHAUSTED, FOUND, levels


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
        *(c.n, target, width, limit, keys, c.pred_ptr, c.succ_ptr, c.succ, c.touch_ptr, c.touch, c.user_ptr),
        *(c.size, c.given, c.kept),
    )
    kind = {FOUND: Outcome.FOUND, EXHAUSTED: Outcome.EXHAUSTED}.get(int(outcome), Outcome.GAVE_UP)
    return Found(outcome=kind, order=c.n - 1 - order[::-1] if backwards else order, work=int(work))


def widest(core: Core, memory: int = 2**26) -> int:
    """The most states that a search may hold so that its tables stay within `memory` bytes."""
    return max(1, memory // (24 * core.n + 8 * core.m + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """The best order found, its max live, a bound of all orders, and the work that is left."""

    order: Ints
    max_live: int
    bound: int
    left: int


def narrow(core: Core, order: Ints, bound: int, *, width: int, work: int) -> Narrowed:
    """Search for ever better orders between `bound` and what `order` needs, until they meet or `work` is spent.

    First at the bound, which ends it if it succeeds; then halfway between what failed and what is known to
    do; at last one byte below the best. A search that tried all raises the bound.
    """
    best, peak, low = order, int(step_bytes(core, order).max(initial=0)), bound
    target = low
    while low < peak and work > 0:
        for backwards in (True, False):
            found = search(core, target, width=width, limit=work, backwards=backwards)
            work -= found.work
            if found.outcome is not Outcome.GAVE_UP:
                break
        if found.outcome is Outcome.FOUND:
            best, peak = found.order, int(step_bytes(core, found.order).max())
        else:
            low = target + 1
            if found.outcome is Outcome.EXHAUSTED:
                bound = max(bound, low)
        target = (low + peak - 1) // 2
    return Narrowed(order=best, max_live=peak, bound=bound, left=work)
