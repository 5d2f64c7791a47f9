"""`reverse_greedy`: `greedy` backwards in time, so that the last op is chosen first."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import GREEDY
from memplan.schedule.policies.orders import listed, scheduled


def reverse_greedy(graph: Graph) -> Schedule:
    """Good where an order must keep large things short rather than free early."""
    return scheduled(graph, "reverse_greedy", GREEDY, backwards=True)


def reverse_greedy_order(core: GraphArrays) -> Ints:
    """`reverse_greedy` of a core."""
    return listed(core, GREEDY, backwards=True)
