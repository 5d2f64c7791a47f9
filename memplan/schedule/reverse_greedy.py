"""`reverse_greedy`: `greedy` backwards in time, so that the last op is chosen first."""

from __future__ import annotations

from memplan.graph import Graph
from memplan.schedule.base import Schedule
from memplan.schedule.core import Core, Ints
from memplan.schedule.list_kernel import GREEDY
from memplan.schedule.orders import listed, scheduled


def reverse_greedy(graph: Graph) -> Schedule:
    """Good where an order must keep large things short rather than free early."""
    return scheduled(graph, "reverse_greedy", GREEDY, backwards=True)


def reverse_greedy_order(core: Core) -> Ints:
    """`reverse_greedy` of a core."""
    return listed(core, GREEDY, backwards=True)
