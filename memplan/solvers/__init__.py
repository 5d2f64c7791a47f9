"""Solvers: `Problem -> Solution`, one file each behind the protocol in `base.py`.

    from memplan import Buffer, Interval, solve
    plan = solve([Buffer(id="a", size=4096, live=Interval(0, 3)), Buffer(id="b", size=512, live=Interval(2, 9))])
    plan.offsets["b"], plan.arena_size, plan.status

The default, in the order in which it works: `portfolio.py` (a valid placement at once) -> `capacity_search.py` (which
capacity to try next) -> `solve_at_capacity.py` (one capacity) -> `core.py` (normalise), `reduce.py` (what need not be
searched), `heuristics.py` (heuristics), `search.py`, `search_kernel.py` and `branch_kernel.py` (place or skip),
`eject.py` (push out what is in the way), `cpsat_model.py`; `squeaky_wheel.py` for what is large and stays open.
`*_kernel.py` are numba's and imported only when they run. The sizes at which they change how they work are in
`thresholds.py`. Solvers never import torch. None rests on the validator's code: whoever asks for a solution (`solve`
here) validates it, and the portfolio shows it each answer (`accept.py`), to drop those that it refuses.
"""

from __future__ import annotations

from memplan.solvers.base import Solver
from memplan.solvers.limits import Progress, SolverLimits
from memplan.solvers.select import SOLVERS, select_solver, solve

__all__ = ["SOLVERS", "SolverLimits", "Progress", "Solver", "select_solver", "solve"]
