"""On-demand eviction that knows when each storage is used next; `auto` falls back to it near the floor of the budget.

DTR evicts when an allocation does not fit, and guesses from the past what is needed late. Here the step is known, so
the time until the next use takes the place of the time since the last (Belady 1966). An exponent weighs the time of
recomputing: with a smaller one the step tends to take longer, and may need fewer bytes where blocks run several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.dtr import Candidate, dtr
from memplan.evict.workload import Workload
from memplan.evict.workload_limits import infeasible

_EXPONENTS = (1.0, 0.5)
_MOST_RUNS = 6  # of each op on average


def h_ahead(candidate: Candidate, *, exponent: float = 1.0) -> float:
    """Return cost ** exponent / (size x time until the next use); the cost includes the dropped neighbourhood."""
    worth = candidate.size * candidate.ahead
    return float((candidate.seconds + candidate.around) ** exponent / worth) if worth > 0 else float("inf")


def on_demand(workload: Workload) -> Iterator[Events]:
    """Yield the events of on-demand eviction by `h_ahead` that keep the budget; they recompute, and copy nothing."""
    for exponent in _EXPONENTS:
        with suppress(BudgetInfeasible):
            events = dtr(workload, heuristic=partial(h_ahead, exponent=exponent), most_runs=_MOST_RUNS)
            if measure(workload, events).peak <= workload.budget:
                yield events


def ahead(workload: Workload) -> Events:
    """Return the first events of `on_demand` that keep the budget. Raises `BudgetInfeasible` when there are none.

    Args:
        workload: The step, and its budget in bytes.

    Returns:
        Events that run, drop and recompute, but copy nothing.

    Raises:
        BudgetInfeasible: None keep the budget; others may.

    Example:
        >>> events = ahead(workload.within(8 << 30))
        >>> measure(workload, events).peak  # at most 8 GiB
    """
    for events in on_demand(workload):
        return events
    raise infeasible(workload)
