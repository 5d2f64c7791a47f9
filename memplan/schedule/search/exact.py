"""`exact`: the best of all orders, by a search over ideals that drops nothing but what cannot be better.

For graphs of some tens of ops, and for larger ones whose ops can hardly change places.
"""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.arrays.graph_arrays import make_core
from memplan.schedule.bounds.prover import Prover
from memplan.schedule.search.ideals import narrow, unsearched, widest


def exact(graph: Graph, *, work: int = 10**9) -> Schedule:
    """An order that is certified, unless the states outgrow 64 MiB or the work its limit."""
    core = make_core(graph)
    prover = Prover(core, 0)
    found = narrow(core, unsearched(core, core.traced, prover.bound, work), width=widest(core))
    prover.searched(found.bound, Evidence.LONG_SEARCH)
    return prover.schedule(graph, found.order, "exact")
