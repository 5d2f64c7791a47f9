"""`greedy`: of all that may run, what leaves the fewest bytes alive."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import GREEDY
from memplan.schedule.policies.orders import listed, scheduled


def greedy(graph: Graph) -> Schedule:
    """Ties go to what allocates less, then to the traced order."""
    return scheduled(graph, "greedy", GREEDY)


def greedy_order(core: GraphArrays) -> Ints:
    """`greedy` of a core."""
    return listed(core, GREEDY)
