"""The limits of a solver in time and work, and its progress reports.

Work is counted in *units* that do not depend on the machine: a unit is one node of the search on up to 200 buffers, and
a node on more buffers counts in proportion. A run that is limited by work alone is exactly reproducible.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

NODE_BUFFERS = 200
DEFAULT_WORK = 1_000_000  # units when neither time nor work is limited: about four seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a solver: the best arena so far and a proven bound, bytes, and the seconds since the start.

    `incumbent` is None before the first placement.
    """

    incumbent: int | None
    bound: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """The limits of a solver: `seconds` of wall time and `work` in units; None for both means `DEFAULT_WORK` units.

    With a limit of zero, only heuristics run. Without `minimize`, a solver stops at the first placement within the
    problem's capacity. `on_progress` is called with every better arena or bound.
    """

    seconds: float | None = None
    work: int | None = None
    minimize: bool = True
    on_progress: Callable[[Progress], None] | None = None


class WorkBudget:
    """Counts work and time against the limits. `share` and `slice` make a budget over a part of the rest."""

    def __init__(self, limits: SolverLimits) -> None:
        self.began = time.perf_counter()
        self._deadline = None if limits.seconds is None else self.began + limits.seconds
        self._timed = limits.seconds is not None
        self._work = DEFAULT_WORK if limits.work is None and limits.seconds is None else limits.work
        self._parent: WorkBudget | None = None
        self.spent = 0

    @property
    def seconds(self) -> float:
        """Wall time since the start, seconds."""
        return time.perf_counter() - self.began

    @property
    def is_over(self) -> bool:
        """Whether the work or the time is spent, here or in an enclosing budget."""
        if self._work is not None and self.spent >= self._work:
            return True
        if self._deadline is not None and time.perf_counter() >= self._deadline:
            return True
        return self._parent is not None and self._parent.is_over

    def remaining_seconds(self) -> float | None:
        """Wall time that is left, seconds; None if only work is limited."""
        return None if self._deadline is None else max(0.0, self._deadline - time.perf_counter())

    def remaining_work(self) -> int | None:
        """Units of work that are left; None if only time is limited."""
        return None if self._work is None else max(0, self._work - self.spent)

    def nodes(self, wanted: int, buffers: int) -> int:
        """The number of `wanted` search nodes, on a piece of `buffers`, that may run before the next call."""
        cost = max(1.0, buffers / NODE_BUFFERS)
        if self._timed:
            wanted = min(wanted, int(20_000 / cost) + 1)
        budget: WorkBudget | None = self
        while budget is not None:
            if budget._work is not None:
                wanted = min(wanted, int((budget._work - budget.spent) / cost) + 1)
            budget = budget._parent
        return max(1, wanted)

    def spend(self, nodes: int, buffers: int) -> None:
        """Count the work of `nodes` search nodes on a piece of `buffers`."""
        units = int(nodes * max(1.0, buffers / NODE_BUFFERS)) + 1
        budget: WorkBudget | None = self
        while budget is not None:
            budget.spent += units
            budget = budget._parent

    def slice(self, work: int) -> WorkBudget:
        """A budget of `work` units, or of the rest if that is less; work spent in it is also spent here."""
        inner = self.share(1.0)
        inner._work = work if inner._work is None else min(work, inner._work)
        return inner

    def share(self, part: float) -> WorkBudget:
        """A budget of the share `part` (0 to 1) of the rest; work spent in it is also spent here."""
        inner = object.__new__(WorkBudget)
        now = time.perf_counter()
        inner.began, inner.spent, inner._parent, inner._timed = now, 0, self, self._timed
        inner._deadline = None if self._deadline is None else now + part * max(0.0, self._deadline - now)
        inner._work = None if self._work is None else int(part * max(0, self._work - self.spent))
        return inner
