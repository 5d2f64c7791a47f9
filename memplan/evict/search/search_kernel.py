"""Compiled search over decisions: `judge` expands them, places copies and measures; `anneal` is a random walk."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.evict.judge.measure_kernel import measure
from memplan.evict.search.expand_kernel import UNDECIDED, expand
from memplan.evict.search.prefetch_kernel import prefetch


@njit(cache=True)
def judge(decision, gap, budget, kinds, indices, extra, tables):
    """Return (area above `budget`, seconds, peak) of these decisions; the area is infinite if they are impossible.

    `kinds` and `indices` are buffers for events; `extra` holds `use_ptr, use, redo_until, last_use` (see `expand`).
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
    decision, gap, budget, seconds, area, choices, rounds, soft, heat, price, seed, kinds, indices, extra, tables
):
    """Anneal over options (Metropolis); return the best decisions within `budget`, their gaps and their seconds.

    The seconds are infinite if no state kept the budget. For the share `soft` of the rounds, bytes above the budget
    cost `price` (seconds per byte and step), at first a fifth of it and rising, because the way to a better state often
    leads through states that do not fit. The other rounds are strict, and begin at the best state so far. `decision`
    and `gap` end as the walk's last state. `choices` is `(ptr, member_ptr, wanted, storage, at)`: choice c has the
    options `ptr[c]:ptr[c + 1]`, option o the members `member_ptr[o]:member_ptr[o + 1]`, each of them a decision for a
    storage, with its gap. `heat` is the first temperature in seconds. The same seed and rounds give the same decisions.
    """
    np.random.seed(seed)
    ptr, members, wanted, storage, at = choices
    best, best_gap, best_seconds = decision.copy(), gap.copy(), seconds if area == 0.0 else np.inf
    new, new_gap = decision.copy(), gap.copy()
    count = ptr.shape[0] - 1
    turn = int(rounds * soft)
    for k in range(rounds):
        strict = k >= turn
        if k == turn:
            decision[:], gap[:], seconds, area = best, best_gap, best_seconds, 0.0
        done = (k - turn) / (rounds - turn) if strict else k / turn
        temperature = heat * (1.0 - done) ** 2
        now = price * 0.2 * 50.0**done
        c = np.random.randint(count)
        o = np.random.randint(ptr[c], ptr[c + 1])
        first = members[o]
        old = decision[storage[first]]
        keep = old != UNDECIDED and np.random.random() < 0.5
        if old == (UNDECIDED if keep else wanted[first]):
            continue
        new[:], new_gap[:] = decision, gap
        if old == UNDECIDED and np.random.random() < 0.5:  # in exchange for another decision
            for _ in range(8):
                other = ptr[np.random.randint(count)]
                if decision[storage[members[other]]] != UNDECIDED:
                    new[storage[members[other] : members[other + 1]]] = UNDECIDED
                    break
        for m in range(first, members[o + 1]):
            new[storage[m]], new_gap[storage[m]] = UNDECIDED if keep else wanted[m], at[m]
        new_area, took, _ = judge(new, new_gap, budget, kinds, indices, extra, tables)
        worse = took - seconds + now * (new_area - area)
        if strict and new_area > 0.0:
            worse = np.inf
        if worse <= 0.0 or np.random.random() < np.exp(-worse / max(temperature, 1e-15)):
            decision[:], gap[:], seconds, area = new, new_gap, took, new_area
            if area == 0.0 and seconds < best_seconds:
                best[:], best_gap[:], best_seconds = decision, gap, seconds
    return best, best_gap, best_seconds
