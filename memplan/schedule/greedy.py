"""`greedy`: of all that may run, what leaves the fewest bytes alive."""

from __future__ import annotations

from memplan.graph import Graph
from memplan.schedule.base import Schedule
from memplan.schedule.core import Core, Ints
from memplan.schedule.list_kernel import GREEDY
from memplan.schedule.orders import listed, scheduled


def greedy(graph: Graph) -> Schedule:
    """Ties go to what allocates less, then to the traced order."""
    return scheduled(graph, "greedy", GREEDY)


def greedy_order(core: Core) -> Ints:
    """`greedy` of a core."""
    return listed(core, GREEDY)
