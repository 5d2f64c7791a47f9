"""Compiled measurement of a sequence of events (bytes by step, seconds, stalls), and the placement of its copies by it.

All policies are compared by `measure`. `prefetch` starts offloads as early as possible, and reloads just in time and
into free bytes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import numpy as np
from numba import njit

RUN, DROP, OFFLOAD, OFFLOADED, RELOAD, RELOADED = range(6)
THERE, DROPPED, RELEASED = range(3)  # on the device or not yet made; dropped; released after its last use
NEVER, HERE, GONE, LEAVING, ARRIVING, AWAY = range(6)


@njit("int64[::1](int64, int64)", cache=True)
def filled(count, value):
    """Return an array of so many integers, all equal: numba compiles each function of numpy anew for each dtype."""
    found = np.empty(count, np.int64)
    for i in range(count):
        found[i] = value
    return found


@njit(cache=True)
def measure(
    kinds, indices, budget,
    read_ptr, read, write_ptr, write, writer_ptr, writer, size,
    pair_ptr, pair, host_resident, seconds, to_host, to_device, begun, copy_size, host_budget, launch,
    seconds_on_host, awaited,
):  # fmt: skip
    """Return (first impossible event or -1, peak bytes, seconds, stall seconds, area above `budget`, live bytes).

    The rules are those of `apply`: a life of a storage lasts from the step that begins it to its last touch, a result
    may take the bytes of an input whose last use is its op, copies in one direction run one after the other. An
    offloaded copy takes `copy_size` on the host from the start of its offload to the end of its last reload. The area
    also counts the bytes there above `host_budget`, which are in no other figure. `begun` are the bytes that each op
    begins at its first run and that stay to the end. To start a copy, and to wait for it, takes `launch` seconds.
    Ops of the host run one after another beside all of that, each when the offload of what it has `awaited` is waited
    for; the step ends when they have ended.
    """
    n, m, count = read_ptr.shape[0] - 1, size.shape[0], kinds.shape[0]
    state = filled(m, NEVER)
    written = filled(m, 0)  # how many of its writers have run in the current life
    on_host = host_resident.copy()
    current, wrote = filled(m, -1), filled(m, -1)
    ran = filled(n, 0)
    lives, most = m, 0
    for e in range(count):
        if kinds[e] == RUN:
            lives += write_ptr[indices[e] + 1] - write_ptr[indices[e]]
            most += pair_ptr[indices[e] + 1] - pair_ptr[indices[e]]
        elif kinds[e] == RELOAD:
            lives += 1
    first, last, bytes_of = filled(lives, 0), filled(lives, 0), filled(lives, 0)
    made = 0
    merge_step, merge_out, merge_in = filled(most, 0), filled(most, 0), filled(most, 0)
    merges = 0
    clock, stall, out_free, in_free = 0.0, 0.0, 0.0, 0.0
    ends, behind = np.zeros(m, np.float64), np.zeros(m, np.float64)  # `behind`: seconds on the host after an offload
    host_free = 0.0
    added = filled(count + 1, 0)
    hosted, kept = filled(m, -1), filled(m, -1)  # the first and last step of each copy
    step, impossible = 0, -1
    for e in range(count):
        kind, i = kinds[e], indices[e]
        needed = LEAVING if kind == OFFLOADED else ARRIVING if kind == RELOADED else HERE
        if kind == RUN:
            if seconds_on_host[i] > 0.0:
                if awaited[i] >= 0 and not on_host[awaited[i]]:
                    behind[awaited[i]] += seconds_on_host[i]
                else:
                    host_free = max(clock, host_free) + seconds_on_host[i]
            for k in range(read_ptr[i], read_ptr[i + 1]):
                s = read[k]
                if state[s] != HERE and state[s] != LEAVING:
                    impossible = e
                    break
                last[current[s]] = step
            if impossible >= 0:
                break
            born = made
            for k in range(write_ptr[i], write_ptr[i + 1]):
                s = write[k]
                moving = state[s] == LEAVING or state[s] == ARRIVING
                if moving and ran[i] == 0:
                    impossible = e
                    break
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
                    impossible = e
                    break
            if impossible >= 0:
                break
            for k in range(pair_ptr[i], pair_ptr[i + 1], 2):
                out, source = pair[k], pair[k + 1]
                if wrote[out] >= born:
                    merge_step[merges], merge_out[merges], merge_in[merges] = step, wrote[out], current[source]
                    merges += 1
            if ran[i] == 0:
                added[step] = begun[i]
            ran[i] += 1
            clock += seconds[i]
            step += 1
            continue
        if kind != RELOAD and state[i] != needed:
            impossible = e
            break
        if kind == DROP:
            state[i] = GONE
            continue
        clock += launch
        if kind == OFFLOAD:
            state[i] = LEAVING
            last[current[i]] = step
            if hosted[i] < 0:
                hosted[i] = step
            kept[i] = step
            out_free = max(clock, out_free) + to_host[i]
            ends[i] = out_free
        elif kind == OFFLOADED:
            state[i] = AWAY
            on_host[i] = 1
            kept[i] = step
            last[current[i]] = step
            stall += max(0.0, ends[i] - clock)
            clock = max(clock, ends[i])
            if behind[i] > 0.0:
                host_free = max(clock, host_free) + behind[i]
                behind[i] = 0.0
        elif kind == RELOAD:
            if not on_host[i] or state[i] == HERE or state[i] == LEAVING or state[i] == ARRIVING:
                impossible = e
                break
            state[i] = ARRIVING
            current[i] = made
            first[made] = last[made] = step
            bytes_of[made] = size[i]
            made += 1
            in_free = max(clock, in_free) + to_device[i]
            ends[i] = in_free
        else:
            state[i] = HERE
            last[current[i]] = kept[i] = step
            stall += max(0.0, ends[i] - clock)
            clock = max(clock, ends[i])
        step += 1
    if impossible >= 0:
        return impossible, 0, 0.0, 0.0, 0.0, first
    stall += max(0.0, host_free - clock)
    clock = max(clock, host_free)
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
    on_host_now = filled(step + 1, 0)
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


@njit(cache=True)
def prefetch(kinds, indices, budget, tables, leads=None, bound=None, border=0):
    """Return the events with an OFFLOADED for each OFFLOAD and a RELOAD for each RELOADED, placed by copy times.

    The bytes of an offload are freed when its copy is predicted to be complete, or when they are needed. A reload
    starts as late as it can, after those that are needed before it, and no earlier than its bytes fit under `budget`;
    `leads` are the seconds by which each is to start earlier than that, by event. No copy of a `bound` storage is under
    way at the event `border`.
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
    back = filled(count, count)  # of an OFFLOAD: its RELOADED; of a RELOADED: its OFFLOAD (or -1)
    latest = filled(size.shape[0], -1)
    gone = filled(size.shape[0], 0)  # of each storage: the event after that which last freed its bytes
    lowest = filled(count, 0)  # of a RELOADED: the first event before which its RELOAD may stand
    for e in range(count):
        if kinds[e] == OFFLOAD:
            latest[indices[e]] = e
        elif kinds[e] == DROP:
            gone[indices[e]] = e + 1
        elif kinds[e] == RELOADED:
            back[e], lowest[e] = latest[indices[e]], gone[indices[e]]
            if back[e] >= 0:
                back[back[e]] = e
            latest[indices[e]] = -1
            if bound is not None and bound[indices[e]] and e >= border:
                lowest[e] = max(lowest[e], border)
    out_at = filled(count, -1)  # OFFLOADED stands before this event
    free = 0.0
    for e in range(count):
        if kinds[e] == OFFLOAD:
            free = max(clock[e], free) + to_host[indices[e]]
            at, end = e + 1, back[e]
            while at < end:  # bisect: the clock never goes back
                middle = (at + end) // 2
                if clock[middle] < free:
                    at = middle + 1
                else:
                    end = middle
            out_at[e] = at
            if bound is not None and bound[indices[e]] and e < border:
                out_at[e] = min(out_at[e], border)
    in_at = filled(count, -1)  # RELOAD stands before this event
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
            if leads is not None:
                start -= leads[e]
            least = max(lowest[e], out_at[back[e]]) if back[e] >= 0 else lowest[e]
            at = e
            while at > least and clock[at] > start:
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
    outs, ins = filled(count + 1, -1), filled(count + 1, -1)  # lists by position
    following = filled(count, -1)
    for e in range(count - 1, -1, -1):
        if kinds[e] == OFFLOAD:
            following[e] = outs[out_at[e]]
            outs[out_at[e]] = e
            extra += 1
        elif kinds[e] == RELOADED:
            following[e] = ins[in_at[e]]
            ins[in_at[e]] = e
            extra += 1
    new_kinds, new_indices = filled(count + extra, 0), filled(count + extra, 0)
    step_of = filled(count, 0)
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


@njit(cache=True)
def seconds_around(storages, lost, below_ptr, below, above_ptr, above, seconds, last, position):
    """Return, for each of `storages`, the seconds of the lost storages around it, without its own.

    These are those that it is made from (`below`), dropped or released, and those that are made from it (`above`),
    dropped and with a use (`last`) at or after `position`, directly or through such storages.
    """
    found = np.zeros(storages.shape[0], np.float64)
    seen = filled(lost.shape[0], -1)
    stack = filled(lost.shape[0], 0)
    for k in range(storages.shape[0]):
        total = 0.0
        for upwards in range(2):
            ptr, edges = (above_ptr, above) if upwards else (below_ptr, below)
            mark = 2 * k + upwards
            seen[storages[k]] = mark
            stack[0] = storages[k]
            depth = 1
            while depth > 0:
                depth -= 1
                top = stack[depth]
                for e in range(ptr[top], ptr[top + 1]):
                    s = edges[e]
                    if seen[s] == mark:
                        continue
                    seen[s] = mark
                    if lost[s] == DROPPED or (lost[s] == RELEASED and not upwards):
                        stack[depth] = s
                        depth += 1
                        if not upwards or last[s] >= position:
                            total += seconds[s]
        found[k] = total
    return found
