"""`lpmf`: least peak memory first, as in torch/_inductor/memory.py `topological_sort_lpmf`."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import LPMF
from memplan.schedule.policies.orders import listed, scheduled


def lpmf(graph: Graph) -> Schedule:
    """Schedule the ready op that fits under the peak so far and leaves the fewest bytes alive; if none fits, the one
    that allocates the fewest."""
    return scheduled(graph, "lpmf", LPMF)


def lpmf_order(core: GraphArrays) -> Ints:
    """The order of `lpmf` for the arrays of a graph."""
    return listed(core, LPMF)
