"""Compiled walk over the dropped storages around others, which DTR's heuristic asks for at every eviction."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import numpy as np
from numba import njit

THERE, DROPPED, RELEASED = range(3)  # on the device or not yet made; dropped; released after its last use


@njit(cache=True)
def seconds_around(storages, lost, below_ptr, below, above_ptr, above, seconds, last, position):
    """Return, for each of `storages`, the seconds of the lost storages around it, without its own.

    These are those that it is made from (`below`), dropped or released, and those that are made from it (`above`),
    dropped and with a use (`last`) at or after `position`, directly or through such storages.
    """
    found = np.zeros(storages.shape[0], np.float64)
    seen = np.full(lost.shape[0], -1, np.int64)
    stack = np.empty(lost.shape[0], np.int64)
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
