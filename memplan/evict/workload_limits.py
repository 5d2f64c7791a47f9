"""Limits of every policy: the floor of the budget, and the last op before which a storage can be recomputed.

The floor is the largest working set of one op: below it no plan exists. The limit of a storage is the last op before
which it can be recomputed; no storage is assumed to be kept beyond its own last use for the sake of a recompute.
"""

from __future__ import annotations

from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Workload


def floor(workload: Workload) -> tuple[int, int]:
    """Return (bytes, op index) of the largest working set: operands and results, less what the op can do in place.

    Whatever is recomputed or moved, an op's operands and results are on the device while it runs, and the gradients
    that stay in the arena and have begun.
    """
    most, at, staying = 0, 0, 0
    for i in range(len(workload.graph.ops)):
        touched = dict.fromkeys((*workload.reads[i], *workload.writes[i]))
        need = sum(workload.size[s] for s in touched)
        saved = max((workload.size[out] for out, _ in workload.pairs[i]), default=0)
        staying += workload.begun[i]
        if need - saved + staying > most:
            most, at = need - saved + staying, i
    return most, at


def require_floor(workload: Workload) -> None:
    """Raise `BudgetInfeasible`, naming the op that needs the most, if the budget is below the floor."""
    least, at = floor(workload)
    if least > workload.budget:
        name = workload.graph.ops[at].name
        raise BudgetInfeasible(
            f"what op {name} reads and writes is {least} bytes; the budget is {workload.budget}",
            op=name,
            smallest=least,
            hint=f"give at least {least} bytes, or a smaller batch",
        )


def infeasible(workload: Workload) -> BudgetInfeasible:
    """Return the error of a policy that found no way to keep the budget; the caller adds the details."""
    return BudgetInfeasible(f"no way was found to stay within {workload.budget} bytes", op="", smallest=0)


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
