"""`reverse_greedy`: `greedy` with time reversed, so that the last op is chosen first."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import GREEDY
from memplan.schedule.policies.orders import listed, scheduled


def reverse_greedy(graph: Graph) -> Schedule:
    """Schedule by `greedy` from the last op backwards; good if large storages should be made late."""
    return scheduled(graph, "reverse_greedy", GREEDY, backwards=True)


def reverse_greedy_order(core: GraphArrays) -> Ints:
    """The order of `reverse_greedy` for the arrays of a graph."""
    return listed(core, GREEDY, backwards=True)
