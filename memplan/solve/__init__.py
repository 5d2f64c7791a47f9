"""Solvers: `Problem -> Solution`, one file each behind the protocol in `base.py`.

    from memplan import Buffer, Interval, solve
    plan = solve([Buffer(id="a", size=4096, live=Interval(0, 3)), Buffer(id="b", size=512, live=Interval(2, 9))])
    plan.offsets["b"], plan.arena_size, plan.status

The default, in the order in which it works: `portfolio.py` (a valid placement at once) -> `race.py` (which
capacity to try next) -> `attempt.py` (one capacity) -> `core.py` (normalise), `reduce.py` (what need not be
searched), `quick.py` (heuristics), `search.py`, `search_kernel.py` and `branch_kernel.py` (place or skip),
`eject.py` (push out what is in the way), `cpsat_model.py`; `squeaky.py` for what is large and stays open.
`*_kernel.py` are numba's and imported only when they run. The sizes at which they change how they work are in
`thresholds.py`. Solvers never import torch. None rests on the validator's code: whoever asks for a solution (`solve`
here) validates it, and the portfolio shows it each answer (`accept.py`), to drop those that it refuses.
"""

from __future__ import annotations

from memplan.solve.base import Solver
from memplan.solve.budget import Limits, Progress
from memplan.solve.select import SOLVERS, select_solver, solve

__all__ = ["SOLVERS", "Limits", "Progress", "Solver", "select_solver", "solve"]
