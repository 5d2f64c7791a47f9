"""The policies that order ops by one rule of list scheduling, each a `Graph -> Schedule`.

`greedy` runs the ready op that leaves the fewest bytes alive, and `reverse_greedy` does so from the last op backwards.
`lpmf` (least peak memory first) is `topological_sort_lpmf` of torch/_inductor/memory.py. `early_free` keeps the traced
order, except that an op that frees at least as much as it allocates runs early; `late_alloc` is its reverse in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule, make_schedule
from memplan.schedule.graph_arrays import GraphArrays, Ints, make_graph_arrays, reverse
from memplan.schedule.search_kernel import EARLY_FREE, GREEDY, LPMF, list_order

RULES: Mapping[str, tuple[int, bool]] = MappingProxyType(
    {
        "early_free": (EARLY_FREE, False),
        "late_alloc": (EARLY_FREE, True),
        "lpmf": (LPMF, False),
        "greedy": (GREEDY, False),
        "reverse_greedy": (GREEDY, True),
    }
)
"""The rule of each policy, and whether it chooses the last op first; in the order in which `auto` tries them."""


def listed(arrays: GraphArrays, policy: str) -> Ints:
    """The order of `policy`, a key of `RULES`, for the arrays of a graph."""
    rule, backwards = RULES[policy]
    c = reverse(arrays) if backwards else arrays
    order: Ints = list_order(
        *(c.n, rule, c.pred_ptr, c.succ_ptr, c.succ, c.touch_ptr, c.touch, c.user_ptr, c.user, c.size),
        *(c.given, c.kept, c.backwards, c.chance_ptr, c.donor, c.saved),
    )
    return c.n - 1 - order[::-1] if backwards else order


def early_free(graph: Graph) -> Schedule:
    """Schedule ops that free at least as much as they allocate as early as possible: each update after its gradient."""
    return _scheduled(graph, "early_free")


def late_alloc(graph: Graph) -> Schedule:
    """Schedule ops that allocate at least as much as they free as late as possible: `early_free` with time reversed."""
    return _scheduled(graph, "late_alloc")


def lpmf(graph: Graph) -> Schedule:
    """Schedule the ready op that fits under the peak so far and leaves the fewest bytes alive; if none fits, the one
    that allocates the fewest."""
    return _scheduled(graph, "lpmf")


def greedy(graph: Graph) -> Schedule:
    """Schedule the ready op that leaves the fewest bytes alive; ties: smaller allocation, then traced order."""
    return _scheduled(graph, "greedy")


def reverse_greedy(graph: Graph) -> Schedule:
    """Schedule by `greedy` from the last op backwards; good if large storages should be made late."""
    return _scheduled(graph, "reverse_greedy")


def _scheduled(graph: Graph, policy: str) -> Schedule:
    arrays = make_graph_arrays(graph)
    return make_schedule(graph, arrays.graph_order(listed(arrays, policy)), policy)
