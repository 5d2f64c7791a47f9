"""A schedule: a total order of a graph's ops, what it needs, and what every order needs at least."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from memplan.core.graph import Graph, Op
from memplan.core.in_place_reuse import placed
from memplan.core.problem import Interval


class Evidence(enum.Enum):
    """What proves that no order needs less than the bound; the value is the message for the user."""

    WORKING_SET = "what {op} reads and writes"
    CUT = "the cut at {op}"
    BETWEEN = "the cut between forward and backward"
    SEARCH = "a search through all orders"  # of the portfolio, which anyone can repeat
    LONG_SEARCH = "a long search through all orders"  # of another policy; not repeated when a plan is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`order` holds op indices; the step of an op is its position in it.

    `max_live` and `bound` are bytes of planned storages without alignment: the most that are alive at one
    step of this order, and a lower bound of that over all legal orders. `evidence` is how the bound is
    proven, `proof` the name of the op at which it is ("" when it takes all of them). `claimed`: the bound is
    what a plan file says; loading the file did not prove it again (`memplan check --verify` does). It is a
    state of this process and no part of the value: a file cannot say that its bound is proven.
    """

    policy: str
    order: tuple[int, ...]
    max_live: int
    bound: int
    evidence: Evidence = Evidence.WORKING_SET
    proof: str = ""
    claimed: bool = field(default=False, compare=False)

    @property
    def gap(self) -> float:
        """max_live / bound - 1: how far a better order could be, at most; no more than a claim if `claimed`."""
        return self.max_live / self.bound - 1 if self.bound else 0.0

    @property
    def certified(self) -> bool:
        """No order needs less: proven here, or proven again when the plan was loaded."""
        return self.max_live == self.bound and not self.claimed


def make_schedule(graph: Graph, order: tuple[int, ...], policy: str) -> Schedule:
    """A schedule of `order`, measured, with the bound that costs nothing."""
    live = live_bytes(graph, order)
    bound, op = working_set(graph)
    return Schedule(policy=policy, order=order, max_live=max(live, default=0), bound=bound, proof=op)


def storage_intervals(graph: Graph, order: tuple[int, ...]) -> dict[int, Interval]:
    """Storage index -> [first touch, last touch + 1) in steps, for every storage that an op touches.

    What the caller keeps (outputs, gradients) stays alive to the end of the step. A storage whose bytes others
    take lives as long as the last of them, and those others are left out.
    """
    graph = placed(graph, order)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, op_index in enumerate(order):
        for storage in graph.touched(graph.ops[op_index]):
            first.setdefault(storage, step)
            last[storage] = step
    for value in (*graph.outputs, *graph.gradients):
        storage = graph.values[value].storage
        if storage in last:
            last[storage] = len(order) - 1
    return {storage: Interval(first[storage], last[storage] + 1) for storage in first}


def live_bytes(graph: Graph, order: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of planned storages alive at each step, alignment left out."""
    change = [0] * (len(order) + 1)
    for storage, live in storage_intervals(graph, order).items():
        if graph.storages[storage].planned:
            change[live.start] += graph.storages[storage].nbytes
            change[live.end] -= graph.storages[storage].nbytes
    live_now, profile = 0, []
    for delta in change[:-1]:
        live_now += delta
        profile.append(live_now)
    return tuple(profile)


def working_set(graph: Graph) -> tuple[int, str]:
    """Bytes of the largest working set, and the op (its name) that touches them: all that one op touches is
    alive while it runs, whatever the order; a result that may lie in an input counts once."""
    sizes = [_touched_bytes(graph, op) for op in graph.ops]
    most = max(sizes, default=0)
    return most, graph.ops[sizes.index(most)].name if sizes else ""


def _touched_bytes(graph: Graph, op: Op) -> int:
    touched = sum(graph.storages[s].nbytes for s in graph.touched(op) if graph.storages[s].planned)
    return touched - max(
        (graph.storages[graph.values[result].storage].nbytes for result, _ in op.inplace_candidates), default=0
    )


def working_set_bound(graph: Graph) -> int:
    """Bytes of the largest working set."""
    return working_set(graph)[0]
