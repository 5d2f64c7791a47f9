"""Decisions judged and improved in compiled code: expand, place copies, measure; and annealing over that."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.evict.expand_kernel import KEEP, expand
from memplan.evict.measure_kernel import measure
from memplan.evict.prefetch_kernel import prefetch


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
    decision, gap, budget, seconds, moves, move_gap, move_ptr, rounds, heat, seed, kinds, indices, extra, tables
):
    """Metropolis over single changes that stay under `budget`; the best decisions found and their seconds.

    `moves[move_ptr[c]:move_ptr[c + 1]]` are pairs (storage, decision) of candidate c, `move_gap` their gaps;
    `heat` is the first temperature in seconds. The same seed and rounds give the same decisions.
    """
    np.random.seed(seed)
    best, best_gap, best_seconds = decision.copy(), gap.copy(), seconds
    count = move_ptr.shape[0] - 1
    for k in range(rounds):
        temperature = heat * (1.0 - k / rounds)
        c = np.random.randint(count)
        at = np.random.randint(move_ptr[c], move_ptr[c + 1])
        s, wanted = moves[at, 0], moves[at, 1]
        if decision[s] == wanted and gap[s] == move_gap[at]:
            wanted = KEEP
        old, old_gap = decision[s], gap[s]
        decision[s], gap[s] = wanted, move_gap[at]
        other, other_old, other_gap = -1, 0, 0
        if np.random.random() < 0.5:  # a second change: one storage for another
            c = np.random.randint(count)
            at = np.random.randint(move_ptr[c], move_ptr[c + 1])
            if moves[at, 0] != s:
                other = moves[at, 0]
                other_old, other_gap = decision[other], gap[other]
                decision[other] = moves[at, 1] if decision[other] == KEEP else KEEP
                gap[other] = move_gap[at]
        area, took, _ = judge(decision, gap, budget, kinds, indices, extra, tables)
        worse = took - seconds
        if area == 0.0 and (worse <= 0.0 or np.random.random() < np.exp(-worse / max(temperature, 1e-15))):
            seconds = took
            if seconds < best_seconds:
                best[:], best_gap[:], best_seconds = decision, gap, seconds
        else:
            decision[s], gap[s] = old, old_gap
            if other >= 0:
                decision[other], gap[other] = other_old, other_gap
    return best, best_gap, best_seconds
