"""memplan: ahead-of-time static memory planning for PyTorch graphs.

`plan`, `compile`, `solve` and `load` are all that most users need. Importing this package imports no torch
and patches nothing: what needs torch is imported on first use.
"""

from __future__ import annotations

from memplan.errors import MemplanError
from memplan.problem import Buffer, Interval, Problem, Solution, Status
from memplan.solve import solve
from memplan.validate import validate

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Interval",
    "MemplanError",
    "Problem",
    "Solution",
    "Status",
    "solve",
    "validate",
]
