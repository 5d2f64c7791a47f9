"""Computes list-scheduled orders, forwards and backwards in time."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule, make_schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, make_core, reverse
from memplan.schedule.policies.list_kernel import list_order


def listed(core: GraphArrays, rule: int, *, backwards: bool = False) -> Ints:
    """The list-scheduled order by `rule`. With `backwards`, the last op is chosen first."""
    c = reverse(core) if backwards else core
    order: Ints = list_order(
        *(c.n, rule, c.pred_ptr, c.succ_ptr, c.succ, c.touch_ptr, c.touch, c.user_ptr, c.user, c.size),
        *(c.given, c.kept, c.backwards, c.chance_ptr, c.host, c.saved),
    )
    return c.n - 1 - order[::-1] if backwards else order


def scheduled(graph: Graph, policy: str, rule: int, *, backwards: bool = False) -> Schedule:
    """The list-scheduled order by `rule`, as a schedule of `graph`."""
    core = make_core(graph)
    return make_schedule(graph, core.graph_order(listed(core, rule, backwards=backwards)), policy)
