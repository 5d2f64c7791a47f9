"""Solvers: `Problem -> Solution`, one file each behind the protocol in `base.py`.

Read `base.py` (the protocol), then any solver. Solvers never import torch and never call the validator's
code; whoever asks for a solution (`solve` here) validates it.
"""

from __future__ import annotations

from memplan.solve.base import Solver
from memplan.solve.budget import Limits, Progress
from memplan.solve.select import SOLVERS, select_solver, solve

__all__ = ["SOLVERS", "Limits", "Progress", "Solver", "select_solver", "solve"]
