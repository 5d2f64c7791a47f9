"""Recompute limits: for each storage, the last op before which it can be recomputed.

No storage is assumed to be kept beyond its own last use for the sake of a recompute.
"""

from __future__ import annotations

from memplan.evict.workload import Workload


def limits(workload: Workload) -> tuple[int, ...]:
    """Return for each storage the last op before which it can be recomputed, whatever else was evicted; -1: never.

    Its writers must be able to run again by then (`Workload.redo_until`), and each storage that they read must be
    available: it can be recomputed itself, reloaded (host-resident), or it still has a later use of its own. A
    storage may be evicted between two uses only if its limit is not before its last use.
    """
    w = workload
    found = [-1] * len(w.size)
    # A storage is written after everything that its writers read, so the order of first writers is topological.
    for s in sorted((s for s, ops in enumerate(w.writers) if ops and w.recomputable[s]), key=lambda s: w.writers[s][0]):
        until = w.redo_until[s]
        for r in {r for i in w.writers[s] for r in w.reads[i]} - {s, *w.host_resident}:
            last = w.uses[r][-1]
            until = min(until, found[r] if found[r] >= last else last)
        found[s] = until
    return tuple(found)
