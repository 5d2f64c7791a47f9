"""Computes the memory cost of updates that wait for all gradients (clipping by the global norm), or for several steps.

A whole training step needs little memory because each gradient has its last use in its parameter's update. An op that
reads all gradients, and that all updates depend on, keeps all gradients alive until the last one exists. This module
finds that op in the graph and orders the step once more without it; the difference in max live is the cost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memplan.core.graph import Graph, Op, StorageKind
from memplan.core.legal_orders import predecessors
from memplan.schedule.select import order

if TYPE_CHECKING:
    from networkx import DiGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """An op that all updates depend on, and that reads all gradients.

    `op` is its name and `target` its ATen op; `gradients` is the number of gradients, `nbytes` their total bytes.
    `max_live` (bytes) is that of the step, `without` that of the best order found for the step without the op.
    """

    op: str
    target: str
    gradients: int
    nbytes: int
    max_live: int
    without: int

    @property
    def costs(self) -> int:
        """Bytes of max live that the barrier costs."""
        return max(self.max_live - self.without, 0)


def price(graph: Graph, max_live: int) -> Barrier | None:
    """Return the barrier of a step with `max_live` bytes, or None.

    To compute its cost, the step is ordered without it.
    """
    updates = [i for i, op in enumerate(graph.ops) if _parameters(graph, op)]
    found = _last_before_all(predecessors(graph), updates)
    dependencies = graph.to_networkx() if found else None
    for last in found:
        held = _held(graph, dependencies, last, updates)
        if held is not None:
            op = graph.ops[last]
            return Barrier(
                op=op.name,
                target=op.target,
                gradients=len(held),
                nbytes=sum(graph.storages[s].nbytes for s in held),
                max_live=max_live,
                without=order(_without(graph, dependencies, last)).max_live,
            )
    return None


def _parameters(graph: Graph, op: Op) -> list[int]:
    """Return the number of elements of each parameter that `op` writes."""
    written = (graph.values[v] for v in op.writes)
    return [_count(v.shape) for v in written if graph.storages[v.storage].kind is StorageKind.PARAMETER]


def _last_before_all(before: tuple[frozenset[int], ...], updates: list[int]) -> list[int]:
    """Return the ops that all updates depend on, leaving out those that another such op depends on."""
    if len(updates) < 2:
        return []
    waiting = [0] * len(before)  # for each op, the updates (as bits) that depend on it
    shared = [True] * len(before)
    everything = (1 << len(updates)) - 1
    bit = {update: 1 << i for i, update in enumerate(updates)}
    for op in range(len(before) - 1, -1, -1):
        for earlier in before[op]:
            waiting[earlier] |= waiting[op] | bit.get(op, 0)
            shared[earlier] &= waiting[op] != everything
    return [op for op, found in enumerate(waiting) if found == everything and shared[op]]


def _held(graph: Graph, dependencies: DiGraph, last: int, updates: list[int]) -> set[int] | None:
    """Return the planned storages of the gradients that `last` keeps alive; None unless every update has one.

    They are written before `last`, and read after it by an update or by ops that only the update depends on.
    """
    import networkx

    early = networkx.ancestors(dependencies, last)
    made = {s for i in early for s in graph.written(graph.ops[i]) if graph.storages[s].planned}
    rest = dependencies.copy()
    rest.remove_nodes_from(early | {last})
    held: set[int] = set()
    for update in updates if made else ():
        late = networkx.ancestors(rest, update) | {update}
        found = {
            graph.values[v].storage
            for i in late
            for v in graph.ops[i].reads
            if graph.values[v].storage in made
            and _count(graph.values[v].shape) in _parameters(graph, graph.ops[update])
        }
        if not found:
            return None
        held |= found
    return held or None


def _without(graph: Graph, dependencies: DiGraph, last: int) -> Graph:
    """Return the graph without `last` and the ops that only it depends on; no op reads their results any more."""
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    gone = {last}
    for op in range(last - 1, -1, -1):
        written = graph.written(graph.ops[op])
        after = set(dependencies.successors(op))
        if after and after <= gone and all(graph.storages[s].planned and s not in kept for s in written):
            gone.add(op)
    lost = {s for op in gone for s in graph.written(graph.ops[op])}
    lost -= {s for i, op in enumerate(graph.ops) if i not in gone for s in graph.written(op)}
    return replace(graph, ops=tuple(_unread(graph, op, lost) for i, op in enumerate(graph.ops) if i not in gone))


def _unread(graph: Graph, op: Op, lost: set[int]) -> Op:
    reads = tuple(v for v in op.reads if graph.values[v].storage not in lost)
    return replace(
        op, reads=reads, inplace_candidates=tuple(pair for pair in op.inplace_candidates if pair[1] in reads)
    )


def accumulated(graph: Graph) -> int:
    """Return the bytes of gradients that are accumulated over several training steps.

    These are storages that outlive the step like optimizer state, and that an op which updates no parameter writes
    and reads together with a planned storage of the same size.
    """
    found: set[int] = set()
    for op in graph.ops:
        if not _parameters(graph, op):
            sizes = {graph.storages[graph.values[v].storage].nbytes for v in op.reads if _planned(graph, v)}
            outlive = {s for s in graph.written(op) if graph.storages[s].kind is StorageKind.OPTIMIZER_STATE}
            found |= {s for s in outlive if graph.storages[s].nbytes in sizes}
    return sum(graph.storages[s].nbytes for s in found)


def _planned(graph: Graph, value: int) -> bool:
    return graph.storages[graph.values[value].storage].planned


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
