"""Published methods of offset assignment that memplan is compared with, and does not build on; one file each.

Each is a solver: `memplan.solve(problem, solver=TLSF())`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.baselines.hill_climb import HillClimb
from benchmarks.baselines.shared_objects import Shared
from benchmarks.baselines.tlsf import TLSF
from memplan.solvers.base import Solver

_ALL: tuple[Solver, ...] = (Shared(), HillClimb(), TLSF())
BASELINES: Mapping[str, Solver] = MappingProxyType({solver.name: solver for solver in _ALL})
