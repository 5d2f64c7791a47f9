"""The floor of a workload: the largest working set of one op, below which no plan exists."""

from __future__ import annotations

from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Workload


def floor(workload: Workload) -> tuple[int, int]:
    """Return (bytes, op index) of the largest working set: operands and results, less what the op can do in place.

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
