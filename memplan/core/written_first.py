"""Proves that no op of a plan reads bytes that nothing has written: the order of writes and reads, op by op.

What the model, the optimizer or the caller holds has its value when the step begins; the gradients that come in have
theirs when the backward begins. Every other storage has one from the first op on that writes it: an op that read it
before that would compute from what an earlier step left there.

The check shares no code with the passes that make graphs, nor with `legal_orders.py`, which keeps the order in which a
graph's ops were traced, and so a fault of the trace too.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.errors import InvalidPlan

_HELD = {StorageKind.INPUT, StorageKind.PARAMETER, StorageKind.CONSTANT, StorageKind.OPTIMIZER_STATE}


def require_written_first(graph: Graph, order: Sequence[int]) -> None:
    """Raise `InvalidPlan` naming the first read, by an op of `order` or by the caller, of what nothing has written."""
    known = {i for i, s in enumerate(graph.storages) if not s.planned and s.kind in _HELD}
    coming = {i for i, s in enumerate(graph.storages) if not s.planned and s.kind is StorageKind.TANGENT}
    phase = Phase.FORWARD
    for step, op in enumerate(graph.ops[index] for index in order):
        if phase is not op.phase:
            _require(graph, graph.outputs, known, "the caller", "outputs")
            known, phase = known | coming, op.phase
        _require(graph, op.reads, known, op.name, f"schedule.order[{step}]")
        known.update(graph.values[v].storage for v in op.writes)
    _require(graph, graph.outputs, known, "the caller", "outputs")
    _require(graph, graph.gradients, known | coming, "autograd", "gradients")


def _require(graph: Graph, read: Sequence[int], known: set[int], who: str, where: str) -> None:
    for v in read:
        storage = graph.values[v].storage
        if storage not in known and graph.storages[storage].nbytes:
            what = f"{who} reads {graph.storages[storage].name!r} before anything has written it"
            raise InvalidPlan(what, where=where)
