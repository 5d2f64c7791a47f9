"""Until when a storage can be computed again, if nothing is held for that beyond its own last use."""

from __future__ import annotations

from memplan.evict.workload import Workload


def limits(workload: Workload) -> tuple[int, ...]:
    """Of each storage, the last op before which it can be made again, whatever else was given up; -1: never.

    Its writers must be able to run again by then (`Workload.redo_until`), and each storage that they read must be
    there: it can be made again itself, or had from the host (streamed), or it still waits for a use of its own. A
    storage may be given up between uses only if its limit is not before its last use.
    """
    w = workload
    found = [-1] * len(w.size)
    # A storage is written after all that its writers read: the order of first writers is one of dependence.
    for s in sorted((s for s, ops in enumerate(w.writers) if ops and w.recomputable[s]), key=lambda s: w.writers[s][0]):
        until = w.redo_until[s]
        for r in {r for i in w.writers[s] for r in w.reads[i]} - {s, *w.streamed}:
            last = w.uses[r][-1]
            until = min(until, found[r] if found[r] >= last else last)
        found[s] = until
    return tuple(found)
