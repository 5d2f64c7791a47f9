"""`exact`: the best of all orders, by a search over ideals that drops only states that cannot be better.

It is for graphs of some tens of ops, and for larger ones that have few legal orders.
"""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.arrays.graph_arrays import make_core
from memplan.schedule.bounds.prover import Prover
from memplan.schedule.search.ideals import narrow, unsearched, widest


def exact(graph: Graph, *, work: int = 10**9) -> Schedule:
    """Schedule `graph` by an exhaustive search; certified unless its memory limit or its limit of `work` is reached."""
    core = make_core(graph)
    prover = Prover(core, 0)
    found = narrow(core, unsearched(core, core.traced, prover.bound, work), width=widest(core))
    prover.searched(found.bound, Evidence.LONG_SEARCH)
    return prover.schedule(graph, found.order, "exact")
