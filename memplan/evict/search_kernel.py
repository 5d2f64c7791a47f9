"""Compiled expansion of decisions, one per storage, into the events of the step: absent operands come back on use."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from numba import njit

from memplan.evict.measure_kernel import AWAY, DROP, GONE, HERE, NEVER, OFFLOAD, RELOADED, RUN, filled

UNDECIDED, RECOMPUTE_ONCE, RECOMPUTE_EACH_TIME, TO_HOST, PIN = range(5)
SOON = 6  # ops: a storage whose next use is at most so far away is not evicted before it


@njit(cache=True)
def _stale(s, i, decision, near, remade, redo_until):
    """Return whether `s`, whose last use is over, is recomputed now instead of kept until now: that was some time ago.

    Whether it is over is asked before: a call with arrays takes longer than all else that is done for an operand.
    """
    if decision[s] == PIN or redo_until[s] < i or i - near[s] <= SOON:
        return False
    return decision[s] == RECOMPUTE_EACH_TIME or not remade[s]


@njit(cache=True)
def expand(
    decision, gap, kinds, indices,
    read_ptr, read, write_ptr, write, writer_ptr, writer, use_ptr, use, redo_until, last_use, touch_ptr, touch,
):  # fmt: skip
    """Fill `kinds` and `indices`, and return the number of events, or -1 when an op's operands are not available.

    `redo_until[s]` is the last position before which the writers of `s` can run again (-1: never), `last_use[s]` the
    position of its last use, `gap[s]` that of the use after which `decision[s]` takes effect; `touch` is what each op
    reads and writes.

    UNDECIDED: kept until the last use (and recomputed if a recompute reads it long after). RECOMPUTE_ONCE: dropped
    after `gap[s]`, recomputed for the next use. RECOMPUTE_EACH_TIME: dropped after every use that no other follows
    soon. TO_HOST: offloaded after `gap[s]`. PIN: never evicted.
    """
    n, m = read_ptr.shape[0] - 1, decision.shape[0]
    state = filled(m, NEVER)
    near = filled(m, 0)  # the position of the last touch
    remade = filled(m, 0)
    ran = filled(n, 0)
    stack = filled(m + n + 1, 0)
    pointer = use_ptr.copy()  # the next use, by storage
    count, limit = 0, kinds.shape[0]
    for i in range(n):
        again = True
        while again:
            again = False
            for k in range(read_ptr[i], read_ptr[i + 1]):
                s = read[k]
                if state[s] == HERE and (last_use[s] >= i or not _stale(s, i, decision, near, remade, redo_until)):
                    continue
                depth = 0
                stack[0] = s
                again = True
                while depth >= 0:
                    top = stack[depth]
                    here = state[top] == HERE
                    if here and (last_use[top] >= i or not _stale(top, i, decision, near, remade, redo_until)):
                        depth -= 1
                        continue
                    if count + 2 * (writer_ptr[top + 1] - writer_ptr[top]) + 8 > limit:
                        return -1
                    if state[top] == AWAY:
                        kinds[count], indices[count] = RELOADED, top
                        count += 1
                        state[top] = HERE
                        depth -= 1
                        continue
                    if redo_until[top] < i:
                        return -1
                    missing = -1
                    for j in range(writer_ptr[top], writer_ptr[top + 1]):
                        w = writer[j]
                        if not ran[w]:
                            return -1
                        for r in range(read_ptr[w], read_ptr[w + 1]):
                            needed = read[r]
                            if needed != top and (
                                state[needed] != HERE
                                or (last_use[needed] < i and _stale(needed, i, decision, near, remade, redo_until))
                            ):
                                missing = needed
                                break
                        if missing >= 0:
                            break
                    if missing >= 0:
                        depth += 1
                        if depth >= stack.shape[0]:
                            return -1
                        stack[depth] = missing
                        continue
                    if state[top] == HERE:
                        kinds[count], indices[count] = DROP, top
                        count += 1
                        state[top] = GONE
                    for j in range(writer_ptr[top], writer_ptr[top + 1]):
                        w = writer[j]
                        kinds[count], indices[count] = RUN, w
                        count += 1
                        for r in range(write_ptr[w], write_ptr[w + 1]):
                            if state[write[r]] == GONE:
                                if redo_until[write[r]] < i:  # it would get other bytes than it had
                                    return -1
                                state[write[r]] = HERE
                                remade[write[r]] = 1
                                near[write[r]] = i
                    for j in range(writer_ptr[top], writer_ptr[top + 1]):
                        w = writer[j]
                        for r in range(read_ptr[w], read_ptr[w + 1]):
                            x = read[r]
                            near[x] = i
                            unused = pointer[x] >= use_ptr[x + 1] or use[pointer[x]] > i + SOON
                            if decision[x] == RECOMPUTE_EACH_TIME and state[x] == HERE and x != top and unused:
                                if count + 4 > limit:
                                    return -1
                                kinds[count], indices[count] = DROP, x
                                count += 1
                                state[x] = GONE
                    depth -= 1
        if count + 8 > limit:
            return -1
        kinds[count], indices[count] = RUN, i
        count += 1
        ran[i] = 1
        for k in range(write_ptr[i], write_ptr[i + 1]):
            if state[write[k]] == NEVER:
                state[write[k]] = HERE
        for k in range(touch_ptr[i], touch_ptr[i + 1]):
            s = touch[k]
            near[s] = i
            while pointer[s] < use_ptr[s + 1] and use[pointer[s]] <= i:
                pointer[s] += 1
            if state[s] != HERE or pointer[s] >= use_ptr[s + 1]:
                continue
            following = use[pointer[s]]
            gives_up = decision[s] == RECOMPUTE_ONCE and gap[s] == i
            gives_up = gives_up or (decision[s] == RECOMPUTE_EACH_TIME and following > i + SOON)
            if count + 4 > limit:
                return -1
            if gives_up and i >= writer[writer_ptr[s + 1] - 1]:
                kinds[count], indices[count] = DROP, s
                count += 1
                state[s] = GONE
            elif decision[s] == TO_HOST and gap[s] == i:
                kinds[count], indices[count] = OFFLOAD, s
                count += 1
                state[s] = AWAY
    return count
