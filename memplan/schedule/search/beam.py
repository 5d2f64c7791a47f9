"""`beam`: a search over ideals that keeps only the states with the fewest live bytes."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.arrays.graph_arrays import make_core
from memplan.schedule.bounds.prover import Prover
from memplan.schedule.search.ideals import narrow, unsearched

WIDTH = 64


def beam(graph: Graph, *, width: int = WIDTH, work: int = 10**9) -> Schedule:
    """Schedule `graph` by searches that keep `width` states, starting from the traced order, up to `work` units."""
    core = make_core(graph)
    prover = Prover(core, 0)
    found = narrow(core, unsearched(core, core.traced, prover.bound, work), width=width)
    prover.searched(found.bound, Evidence.LONG_SEARCH)
    return prover.schedule(graph, found.order, "beam")
