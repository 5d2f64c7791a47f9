"""The schedule: a total order of a graph's ops, its max live, and a lower bound of max live over all orders."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memplan.core.graph import Graph, Op
from memplan.core.in_place import placed
from memplan.core.problem import Interval


class Evidence(enum.Enum):
    """The kind of proof that no order needs less than the bound; the value is the message for the user."""

    WORKING_SET = "what {op} reads and writes"
    CUT = "the cut at {op}"
    BETWEEN = "the cut between forward and backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A total order of the ops: `order` holds op indices, and the step of an op is its position in `order`.

    `max_live` and `bound` are bytes of planned storages without alignment padding: the most that are alive at one
    step of this order, and a lower bound of that over all legal orders. `evidence` is the kind of proof of the bound,
    `proof` the name of the op at which it holds ("" between the phases). Loading a plan proves it again.
    """

    policy: str
    order: tuple[int, ...]
    max_live: int
    bound: int
    evidence: Evidence = Evidence.WORKING_SET
    proof: str = ""

    @property
    def gap(self) -> float:
        """max_live / bound - 1: at most this share of max live could be saved."""
        return self.max_live / self.bound - 1 if self.bound else 0.0

    @property
    def certified(self) -> bool:
        """Whether it is proven that no order has a smaller max live."""
        return self.max_live == self.bound


def make_schedule(graph: Graph, order: tuple[int, ...], policy: str) -> Schedule:
    """Make a schedule of `order`: its max live, with the largest working set as the lower bound."""
    live = live_bytes(graph, order)
    bound, op = working_set(graph)
    return Schedule(policy=policy, order=order, max_live=max(live, default=0), bound=bound, proof=op)


def storage_intervals(graph: Graph, order: tuple[int, ...]) -> dict[int, Interval]:
    """Return the live interval [first use, last use + 1), in steps, of every storage (by index) that an op touches.

    Outputs and gradients, which the caller keeps, stay alive until the last step. Where results take the bytes of an
    input in place, the interval of the input's storage covers them, and their own storages are left out.
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
    """Return the bytes of planned storages that are alive at each step, without alignment padding."""
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
    """Return the bytes of the largest working set, and the name of its op.

    The working set of an op is everything that it touches, which is alive while it runs in every order. A result that
    may be in place counts once, together with its input.
    """
    sizes = [_touched_bytes(graph, op) for op in graph.ops]
    most = max(sizes, default=0)
    return most, graph.ops[sizes.index(most)].name if sizes else ""


def _touched_bytes(graph: Graph, op: Op) -> int:
    touched = sum(graph.storages[s].nbytes for s in graph.touched(op) if graph.storages[s].planned)
    return touched - max(
        (graph.storages[graph.values[result].storage].nbytes for result, _ in op.inplace_candidates), default=0
    )


def working_set_bound(graph: Graph) -> int:
    """Return the bytes of the largest working set."""
    return working_set(graph)[0]
