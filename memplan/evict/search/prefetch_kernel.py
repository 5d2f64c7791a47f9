"""Compiled placement of copies: offloads start as early as possible, reloads just in time and into free bytes."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import njit

from memplan.evict.judge.measure_kernel import DROP, OFFLOAD, OFFLOADED, RELOAD, RELOADED, RUN, measure


@njit(cache=True)
def prefetch(kinds, indices, budget, tables):
    """Return the events with an OFFLOADED for each OFFLOAD and a RELOAD for each RELOADED, placed by copy times.

    The bytes of an offload are freed when its copy is predicted to be complete, or when they are needed. A reload
    starts as late as it can, after those that are needed before it, and no earlier than its bytes fit under `budget`.
    """
    seconds, to_host, to_device = tables[10], tables[11], tables[12]
    size = tables[6]
    count = kinds.shape[0]
    clock = np.zeros(count + 1, np.float64)
    swaps = 0
    for e in range(count):
        clock[e + 1] = clock[e] + (seconds[indices[e]] if kinds[e] == RUN else 0.0)
        swaps += kinds[e] == OFFLOAD or kinds[e] == RELOADED
    if swaps == 0:
        return kinds, indices
    back = np.full(count, count, np.int64)  # of an OFFLOAD: its RELOADED; of a RELOADED: its OFFLOAD (or -1)
    latest = np.full(size.shape[0], -1, np.int64)
    for e in range(count):
        if kinds[e] == OFFLOAD:
            latest[indices[e]] = e
        elif kinds[e] == RELOADED:
            back[e] = latest[indices[e]]
            if back[e] >= 0:
                back[back[e]] = e
            latest[indices[e]] = -1
    out_at = np.full(count, -1, np.int64)  # OFFLOADED stands before this event
    free = 0.0
    for e in range(count):
        if kinds[e] == OFFLOAD:
            free = max(clock[e], free) + to_host[indices[e]]
            at = np.searchsorted(clock, free)
            out_at[e] = min(max(at, e + 1), back[e])
    in_at = np.full(count, -1, np.int64)  # RELOAD stands before this event
    for e in range(count):
        if kinds[e] == RELOADED:
            in_at[e] = e
    if budget > 0:
        first, firsts, step_of = _assemble(kinds, indices, out_at, in_at)
        live = measure(first, firsts, budget, *tables)[5]
        if live.shape[0] < step_of[count - 1]:
            return first, firsts
        for e in range(count):  # above the budget, the step waits for the offloads under way
            if kinds[e] != OFFLOAD:
                continue
            at = e + 1
            while at < out_at[e] and (kinds[at] == DROP or live[step_of[at]] <= budget):
                at += 1
            for k in range(at, out_at[e]):
                if kinds[k] != DROP:
                    live[step_of[k]] -= size[indices[e]]
            out_at[e] = at
        starts = np.inf
        for e in range(count - 1, -1, -1):
            if kinds[e] != RELOADED:
                continue
            s = indices[e]
            start = min(clock[e], starts) - to_device[s]
            lowest = out_at[back[e]] if back[e] >= 0 else 0
            at = e
            while at > lowest and clock[at] > start:
                step = step_of[at - 1]
                if kinds[at - 1] != DROP:
                    if live[step] + size[s] > budget:
                        break
                    live[step] += size[s]
                at -= 1
            in_at[e] = at
            starts = max(start, clock[at]) if clock[at] < clock[e] else min(clock[e], starts)
    kinds, indices, _ = _assemble(kinds, indices, out_at, in_at)
    return kinds, indices


@njit(cache=True)
def _assemble(kinds, indices, out_at, in_at):
    """Return the events with OFFLOADED and RELOAD inserted, and the step of each old event."""
    count = kinds.shape[0]
    extra = 0
    outs, ins = np.full(count + 1, -1, np.int64), np.full(count + 1, -1, np.int64)  # lists by position
    following = np.full(count, -1, np.int64)
    for e in range(count - 1, -1, -1):
        if kinds[e] == OFFLOAD:
            following[e] = outs[out_at[e]]
            outs[out_at[e]] = e
            extra += 1
        elif kinds[e] == RELOADED:
            following[e] = ins[in_at[e]]
            ins[in_at[e]] = e
            extra += 1
    new_kinds, new_indices = np.empty(count + extra, np.int64), np.empty(count + extra, np.int64)
    step_of = np.zeros(count, np.int64)
    made, step = 0, 0
    for e in range(count + 1):
        k = outs[e]
        while k >= 0:
            new_kinds[made], new_indices[made] = OFFLOADED, indices[k]
            made += 1
            step += 1
            k = following[k]
        k = ins[e]
        while k >= 0:
            new_kinds[made], new_indices[made] = RELOAD, indices[k]
            made += 1
            step += 1
            k = following[k]
        if e == count:
            break
        new_kinds[made], new_indices[made] = kinds[e], indices[e]
        made += 1
        step_of[e] = step
        step += kinds[e] != DROP
    return new_kinds, new_indices, step_of
