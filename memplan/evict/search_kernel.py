"""Decisions judged and improved in compiled code: expand, place copies, measure; and annealing over that."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.evict.expand_kernel import KEEP, expand
from memplan.evict.measure_kernel import measure
from memplan.evict.prefetch_kernel import prefetch

SOFT = 0.6  # of the rounds of annealing, in which the budget has a price


@njit(cache=True)
def judge(decision, gap, budget, kinds, indices, extra, tables):
    """(area above `budget`, seconds, peak) of these decisions; the area is infinite when they cannot be.

    `kinds` and `indices` are room for events; `extra` holds `use_ptr, use, redo_until, last_use` (see `expand`).
    """
    count = expand(decision, gap, kinds, indices, *tables[:6], *extra)
    if count < 0:
        return np.inf, np.inf, 0
    new_kinds, new_indices = prefetch(kinds[:count], indices[:count], budget, tables)
    code, peak, seconds, _, area, _ = measure(new_kinds, new_indices, budget, *tables)
    if code >= 0:
        return np.inf, np.inf, 0
    return area, seconds, peak


@njit(cache=True)
def anneal(
    decision, gap, budget, seconds, moves, move_gap, move_ptr, rounds, heat, price, seed, kinds, indices, extra, tables
):
    """Metropolis over single decisions; the best that keep `budget`, and their seconds.

    Bytes above the budget may be had for `price` (seconds per byte and step), at first for a fifth of it and more
    and more: a better way often leads through states that do not fit. `moves[move_ptr[c]:move_ptr[c + 1]]` are
    pairs (storage, decision) of candidate c, `move_gap` their gaps; `heat` is the first temperature in seconds. The
    same seed and rounds give the same decisions.
    """
    np.random.seed(seed)
    best, best_gap, best_seconds = decision.copy(), gap.copy(), seconds
    count = move_ptr.shape[0] - 1
    area = 0.0
    turn = int(rounds * SOFT)
    for k in range(rounds):
        strict = k >= turn
        if k == turn:
            decision[:], gap[:], seconds, area = best, best_gap, best_seconds, 0.0
        done = (k - turn) / (rounds - turn) if strict else k / turn
        temperature = heat * (1.0 - done) ** 2
        now = price * 0.2 * 50.0**done
        c = np.random.randint(count)
        at = np.random.randint(move_ptr[c], move_ptr[c + 1])
        s, wanted = moves[at, 0], moves[at, 1]
        if decision[s] != KEEP and np.random.random() < 0.5:
            wanted = KEEP
        if decision[s] == wanted:
            continue
        old, old_gap = decision[s], gap[s]
        other = s
        if old == KEEP and np.random.random() < 0.5:  # in exchange for another decision
            for _ in range(8):
                other = moves[move_ptr[np.random.randint(count)], 0]
                if decision[other] != KEEP:
                    break
        old_other = decision[other]
        decision[other] = KEEP
        decision[s], gap[s] = wanted, move_gap[at]
        new_area, took, _ = judge(decision, gap, budget, kinds, indices, extra, tables)
        worse = took - seconds + now * (new_area - area)
        if strict and new_area > 0.0:
            worse = np.inf
        if worse <= 0.0 or np.random.random() < np.exp(-worse / max(temperature, 1e-15)):
            seconds, area = took, new_area
            if area == 0.0 and seconds < best_seconds:
                best[:], best_gap[:], best_seconds = decision, gap, seconds
        else:
            decision[other] = old_other
            decision[s], gap[s] = old, old_gap
    return best, best_gap, best_seconds
