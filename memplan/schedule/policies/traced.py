"""`traced`: the order in which the program ran when it was traced, which is eager's order."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule, make_schedule


def traced(graph: Graph) -> Schedule:
    """Schedule the ops in traced order."""
    return make_schedule(graph, tuple(range(len(graph.ops))), "traced")
