"""The least that any plan needs: the largest working set of one op."""

from __future__ import annotations

from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Workload


def floor(workload: Workload) -> tuple[int, int]:
    """(bytes, op index): what the hungriest op reads and writes, less what it can take over from a dying input.

    Whatever is recomputed or moved, an op's operands and results are on the device while it runs.
    """
    most, at = 0, 0
    for i in range(len(workload.graph.ops)):
        touched = dict.fromkeys((*workload.reads[i], *workload.writes[i]))
        need = sum(workload.size[s] for s in touched)
        saved = max((workload.size[out] for out, _ in workload.pairs[i]), default=0)
        if need - saved > most:
            most, at = need - saved, i
    return most, at


def require_floor(workload: Workload) -> None:
    """Raise `BudgetInfeasible`, naming the op that needs more, when the budget is below the floor."""
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
    """No way was found to keep the budget; `fit` says more."""
    return BudgetInfeasible(f"no way was found to stay within {workload.budget} bytes", op="", smallest=0)
