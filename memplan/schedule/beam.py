"""`beam`: a search over ideals that keeps only the states with the fewest live bytes."""

from __future__ import annotations

from memplan.graph import Graph
from memplan.schedule.base import Evidence, Schedule
from memplan.schedule.core import make_core
from memplan.schedule.prover import Prover
from memplan.schedule.search import narrow, unsearched

WIDTH = 64


def beam(graph: Graph, *, width: int = WIDTH, work: int = 10**9) -> Schedule:
    """The best order that searches of this width find, from the traced one down; `work` limits them."""
    core = make_core(graph)
    prover = Prover(core, 0)
    found = narrow(core, unsearched(core, core.traced, prover.bound, work), width=width)
    prover.searched(found.bound, Evidence.LONG_SEARCH)
    return prover.schedule(graph, found.order, "beam")
