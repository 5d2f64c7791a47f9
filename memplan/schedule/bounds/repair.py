"""Cut repair: improves an order at its peak by running first the ops that the minimum cut there has before it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, step_bytes
from memplan.schedule.bounds.cut import Cut

_ROUNDS = 200
_TRIED = 8  # peak steps tried in one round; an order can have thousands


def repair(core: GraphArrays, order: Ints, cut_at: Callable[[int], Cut | None]) -> Ints:
    """Return the order, repaired at its peak steps as long as (max live, number of steps that reach it) becomes
    smaller.

    For a peak at op v whose minimum cut is below the peak, the new order is: the cut's ideal, v, the rest, each in the
    old order. Repair stops when the cut equals the peak (no order is better) or `cut_at` returns None (no work left).
    """
    steps = step_bytes(core, order)
    for _ in range(_ROUNDS):
        better = _repaired(core, order, steps, cut_at)
        if better is None:
            return order
        order = better
        steps = step_bytes(core, order)
    return order


def _repaired(core: GraphArrays, order: Ints, steps: Ints, cut_at: Callable[[int], Cut | None]) -> Ints | None:
    peak = steps.max(initial=0)
    at_peak = np.flatnonzero(steps == peak)
    for step in at_peak[:_TRIED]:
        found = cut_at(int(order[step]))
        if found is None or found.bytes >= peak:
            return None
        before, late = found.ideal[order], order != found.op
        candidate = np.concatenate((order[before], [found.op], order[~before & late]))
        now = step_bytes(core, candidate)
        if (now.max(), int((now == now.max()).sum())) < (peak, len(at_peak)):
            return candidate
    return None
