"""`greedy`: runs the ready op that leaves the fewest bytes alive."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import GREEDY
from memplan.schedule.policies.orders import listed, scheduled


def greedy(graph: Graph) -> Schedule:
    """Schedule the ready op that leaves the fewest bytes alive; ties: smaller allocation, then traced order."""
    return scheduled(graph, "greedy", GREEDY)


def greedy_order(core: GraphArrays) -> Ints:
    """The order of `greedy` for the arrays of a graph."""
    return listed(core, GREEDY)
