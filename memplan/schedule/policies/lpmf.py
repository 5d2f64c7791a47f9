"""`lpmf`: least peak memory first, as in torch/_inductor/memory.py `topological_sort_lpmf`."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints
from memplan.schedule.policies.list_kernel import LPMF
from memplan.schedule.policies.orders import listed, scheduled


def lpmf(graph: Graph) -> Schedule:
    """Of the ops that fit under the peak so far the one that leaves least alive, else the one that allocates least."""
    return scheduled(graph, "lpmf", LPMF)


def lpmf_order(core: GraphArrays) -> Ints:
    """`lpmf` of a core."""
    return listed(core, LPMF)
