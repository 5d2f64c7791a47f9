"""`early_free`: the traced order, but whatever frees at least what it allocates runs as soon as it can."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import EARLY_FREE
from memplan.schedule.policies.orders import listed, scheduled


def early_free(graph: Graph) -> Schedule:
    """Pull forward what frees: in a whole step, each update to its gradient."""
    return scheduled(graph, "early_free", EARLY_FREE)


def late_alloc(graph: Graph) -> Schedule:
    """The same backwards in time: whatever allocates at least what it frees runs as late as it can."""
    return scheduled(graph, "late_alloc", EARLY_FREE, backwards=True)


def early_free_order(core: GraphArrays) -> Ints:
    """`early_free` of a core."""
    return listed(core, EARLY_FREE)


def late_alloc_order(core: GraphArrays) -> Ints:
    """`late_alloc` of a core."""
    return listed(core, EARLY_FREE, backwards=True)
