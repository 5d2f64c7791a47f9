"""List scheduling: of the ready ops, the one with the best key of a rule runs next, until all have run."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import numpy as np

from memplan.schedule.arrays.compiled import CompiledKernel

LPMF, GREEDY, EARLY_FREE = 0, 1, 2


@CompiledKernel
def list_order(
    rule, pred_ptr, succ_ptr, succ, touch_ptr, touch, user_ptr, user, size, given, kept,
    backwards, chance_ptr, donor, saved,
):  # fmt: skip
    """The order by `rule`. Ties go to the lower second key, then to the traced order.

    The bytes that each op would allocate and free are updated when a storage becomes alive or has one use left. So a
    run takes O(edges + touches + ops x ready ops).
    """
    n, m = touch_ptr.shape[0] - 1, size.shape[0]
    waiting = pred_ptr[1:] - pred_ptr[:-1]
    left = user_ptr[1:] - user_ptr[:-1] + kept
    alive = given.copy()
    alloc, freed = np.zeros(n, np.int64), np.zeros(n, np.int64)
    done = np.zeros(n, np.bool_)
    live, final = 0, 0
    for s in range(m):
        final += size[s] * kept[s]
        live += size[s] * given[s]
        for k in range(user_ptr[s], user_ptr[s + 1]):
            if not given[s]:
                alloc[user[k]] += size[s]
            if left[s] == 1:
                freed[user[k]] += size[s]
    peak = max(live, final)
    ready = np.empty(n, np.int64)
    count = 0
    for v in range(n):
        if waiting[v] == 0:
            ready[count] = v
            count += 1
    order = np.empty(n, np.int64)
    for step in range(n):
        at, best0, best1, best2, least = -1, 0, 0, 0, 0
        for i in range(count):
            v = ready[i]
            needs = alloc[v]
            for k in range(chance_ptr[v], chance_ptr[v + 1]):
                s = donor[k]
                if (not alive[s]) if backwards else left[s] == 1:
                    needs = min(needs, alloc[v] - saved[k])
            fits = live + needs <= peak
            if rule == LPMF:
                key0, key1 = 0 if fits else needs, alloc[v] - freed[v]
            elif rule == GREEDY:
                key0, key1 = alloc[v] - freed[v], needs
            else:
                key0, key1 = 0 if fits and alloc[v] <= freed[v] else 1, 0
            if at < 0 or key0 < best0 or (key0 == best0 and (key1 < best1 or (key1 == best1 and v < best2))):
                at, best0, best1, best2, least = i, key0, key1, v, needs
        v = ready[at]
        count -= 1
        ready[at] = ready[count]
        order[step] = v
        done[v] = True
        peak = max(peak, live + least)
        live += alloc[v] - freed[v]
        for k in range(touch_ptr[v], touch_ptr[v + 1]):
            s = touch[k]
            left[s] -= 1
            if alive[s] and left[s] != 1:
                continue
            for j in range(user_ptr[s], user_ptr[s + 1]):
                if not alive[s]:
                    alloc[user[j]] -= size[s]
                if left[s] == 1 and not kept[s] and not done[user[j]]:
                    freed[user[j]] += size[s]
            alive[s] = 1
        for k in range(succ_ptr[v], succ_ptr[v + 1]):
            waiting[succ[k]] -= 1
            if waiting[succ[k]] == 0:
                ready[count] = succ[k]
                count += 1
    return order
