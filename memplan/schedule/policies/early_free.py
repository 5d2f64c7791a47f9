"""`early_free`: the traced order, except that an op that frees at least as much as it allocates runs early."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import EARLY_FREE
from memplan.schedule.policies.orders import listed, scheduled


def early_free(graph: Graph) -> Schedule:
    """Schedule ops that free at least as much as they allocate as early as possible: each update after its gradient."""
    return scheduled(graph, "early_free", EARLY_FREE)


def late_alloc(graph: Graph) -> Schedule:
    """Schedule ops that allocate at least as much as they free as late as possible: `early_free` with time reversed."""
    return scheduled(graph, "late_alloc", EARLY_FREE, backwards=True)


def early_free_order(core: GraphArrays) -> Ints:
    """The order of `early_free` for the arrays of a graph."""
    return listed(core, EARLY_FREE)


def late_alloc_order(core: GraphArrays) -> Ints:
    """The order of `late_alloc` for the arrays of a graph."""
    return listed(core, EARLY_FREE, backwards=True)
