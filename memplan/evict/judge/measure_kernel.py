"""Compiled measurement of a sequence of events: bytes by step, seconds, stalls. All policies are compared by it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

RUN, DROP, OFFLOAD, OFFLOADED, RELOAD, RELOADED = range(6)
NEVER, HERE, GONE, LEAVING, ARRIVING, AWAY = range(6)


@njit(cache=True)
def measure(
    kinds, indices, budget,
    read_ptr, read, write_ptr, write, writer_ptr, writer, size,
    pair_ptr, pair, host_resident, seconds, to_host, to_device, begun, copy_size, host_budget,
):  # fmt: skip
    """Return (first impossible event or -1, peak bytes, seconds, stall seconds, area above `budget`, live bytes).

    The rules are those of `apply`: a life of a storage lasts from the step that begins it to its last touch, a result
    may take the bytes of an input whose last use is its op, copies in one direction run one after the other. An
    offloaded copy takes `copy_size` on the host from the start of its offload to the end of its last reload. The area
    also counts the bytes there above `host_budget`, which are in no other figure. `begun` are the bytes that each op
    begins at its first run and that stay to the end.
    """
    n, m, count = read_ptr.shape[0] - 1, size.shape[0], kinds.shape[0]
    state = np.zeros(m, np.int8)
    written = np.zeros(m, np.int64)  # how many of its writers have run in the current life
    on_host = host_resident.copy()
    current, wrote = np.full(m, -1, np.int64), np.full(m, -1, np.int64)
    ran = np.zeros(n, np.int64)
    lives, most = m, 0
    for e in range(count):
        if kinds[e] == RUN:
            lives += write_ptr[indices[e] + 1] - write_ptr[indices[e]]
            most += pair_ptr[indices[e] + 1] - pair_ptr[indices[e]]
        elif kinds[e] == RELOAD:
            lives += 1
    first, last, bytes_of = np.zeros(lives, np.int64), np.zeros(lives, np.int64), np.zeros(lives, np.int64)
    made = 0
    merge_step, merge_out, merge_in = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    merges = 0
    clock, stall, out_free, in_free = 0.0, 0.0, 0.0, 0.0
    ends = np.zeros(m, np.float64)
    added = np.zeros(count + 1, np.int64)
    hosted, kept = np.full(m, -1, np.int64), np.full(m, -1, np.int64)  # the first and last step of each copy
    step = 0
    for e in range(count):
        kind, i = kinds[e], indices[e]
        if kind == RUN:
            for k in range(read_ptr[i], read_ptr[i + 1]):
                s = read[k]
                if state[s] != HERE and state[s] != LEAVING:
                    return e, 0, 0.0, 0.0, 0.0, first
                last[current[s]] = step
            born = made
            for k in range(write_ptr[i], write_ptr[i + 1]):
                s = write[k]
                moving = state[s] == LEAVING or state[s] == ARRIVING
                if moving and ran[i] == 0:
                    return e, 0, 0.0, 0.0, 0.0, first
                place = 0
                while writer[writer_ptr[s] + place] != i:
                    place += 1
                here = state[s] == HERE
                if here and (written[s] == place or (host_resident[s] and ran[i] == 0)):
                    written[s] += 1
                    last[current[s]] = step
                    wrote[s] = current[s]
                elif place == 0 and ((state[s] == GONE and ran[i] > 0) or state[s] == NEVER):
                    current[s] = wrote[s] = made
                    first[made] = last[made] = step
                    bytes_of[made] = size[s]
                    made += 1
                    written[s] = 1
                    state[s] = HERE
                elif ran[i] > 0 and (here or moving or state[s] == AWAY):
                    wrote[s] = made
                    first[made] = last[made] = step  # discarded
                    bytes_of[made] = size[s]
                    made += 1
                else:
                    return e, 0, 0.0, 0.0, 0.0, first
            for k in range(pair_ptr[i], pair_ptr[i + 1], 2):
                out, source = pair[k], pair[k + 1]
                if wrote[out] >= born:
                    merge_step[merges], merge_out[merges], merge_in[merges] = step, wrote[out], current[source]
                    merges += 1
            if ran[i] == 0:
                added[step] = begun[i]
            ran[i] += 1
            clock += seconds[i]
        elif kind == DROP:
            if state[i] != HERE:
                return e, 0, 0.0, 0.0, 0.0, first
            state[i] = GONE
            continue
        elif kind == OFFLOAD:
            if state[i] != HERE:
                return e, 0, 0.0, 0.0, 0.0, first
            state[i] = LEAVING
            last[current[i]] = step
            if hosted[i] < 0:
                hosted[i] = step
            kept[i] = step
            out_free = max(clock, out_free) + to_host[i]
            ends[i] = out_free
        elif kind == OFFLOADED:
            if state[i] != LEAVING:
                return e, 0, 0.0, 0.0, 0.0, first
            state[i] = AWAY
            on_host[i] = True
            kept[i] = step
            last[current[i]] = step
            stall += max(0.0, ends[i] - clock)
            clock = max(clock, ends[i])
        elif kind == RELOAD:
            if not on_host[i] or state[i] == HERE or state[i] == LEAVING or state[i] == ARRIVING:
                return e, 0, 0.0, 0.0, 0.0, first
            state[i] = ARRIVING
            current[i] = made
            first[made] = last[made] = step
            bytes_of[made] = size[i]
            made += 1
            in_free = max(clock, in_free) + to_device[i]
            ends[i] = in_free
        else:
            if state[i] != ARRIVING:
                return e, 0, 0.0, 0.0, 0.0, first
            state[i] = HERE
            last[current[i]] = kept[i] = step
            stall += max(0.0, ends[i] - clock)
            clock = max(clock, ends[i])
        step += 1
    live = added[: step + 1]
    for k in range(made):
        live[first[k]] += bytes_of[k]
        live[last[k] + 1] -= bytes_of[k]
    for t in range(1, step + 1):
        live[t] += live[t - 1]
    at = -1
    for k in range(merges):
        if merge_step[k] != at and last[merge_in[k]] == merge_step[k]:
            at = merge_step[k]  # one input can hold one result
            live[at] -= bytes_of[merge_out[k]]
    peak, area = 0, 0.0
    for t in range(step):
        peak = max(peak, live[t])
        if live[t] > budget:
            area += live[t] - budget
    on_host_now = np.zeros(step + 1, np.int64)
    for i in range(m):
        if hosted[i] >= 0:
            on_host_now[hosted[i]] += copy_size[i]
            on_host_now[kept[i] + 1] -= copy_size[i]
    held = 0
    for t in range(step):
        held += on_host_now[t]
        if held > host_budget:
            area += held - host_budget
    return -1, peak, clock, stall, area, live[:step]
