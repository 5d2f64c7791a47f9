"""Assigns offsets: `Problem` in, `Solution` out. Solvers are behind the protocol in `base.py`.

    from memplan import Buffer, Interval, solve
    plan = solve([Buffer(id="a", size=4096, live=Interval(0, 3)), Buffer(id="b", size=512, live=Interval(2, 9))])
    plan.offsets["b"], plan.arena_size, plan.status

Start at `placement.py`, the default: a valid placement at once, then `capacity_search.py` (the next capacity),
`solve_at_capacity.py` (one capacity) and `tree_search.py` (place or skip) for a smaller arena or a proof.
`baselines.py` holds heuristics of one rule each, `arrays.py` problems as arrays. Nothing here imports torch or shares
code with the validator.
"""

from __future__ import annotations

from memplan.solvers.base import Progress, Solver, SolverLimits
from memplan.solvers.placement import SOLVERS, select_solver, solve

__all__ = ["SOLVERS", "SolverLimits", "Progress", "Solver", "select_solver", "solve"]
