"""Storages that wait in fewer bytes: found in a graph by the names that `trace/pack.py` gives to its ops."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.core.evictions import Action, Eviction
from memplan.core.graph import Graph, Op

PACKING, PACKED = "_packing", "_packed_as_"  # the last of the ops that pack; how is what follows
UNPACKED, UNPACKING = "_unpacked_as_", "_unpacking"  # the first of those that unpack


def compressions_of(graph: Graph, order: Sequence[int]) -> tuple[Eviction, ...]:
    """Every storage that is packed and unpacked, in the order of its return; steps are positions in `order`.

    The instance is the storage that holds it again; the bytes of its packed form are those of another storage.
    """
    steps = [graph.ops[i] for i in order]
    packed: dict[int, tuple[int, int]] = {}  # what the packing filled -> (what it was made of, last use of that)
    last: dict[int, int] = {}
    found = []
    for step, op in enumerate(steps):
        if not _ours(op.name):
            last.update(dict.fromkeys(graph.touched(op), step))
            continue
        source, filled = _from_to(graph, op)
        if UNPACKED in op.name:
            origin, before = packed.get(source, (source, step))
            found.append(_eviction(graph, steps, step, origin, before))
        elif UNPACKING not in op.name and filled != source:
            packed[filled] = packed.get(source, (source, last.get(source, step)))
    return tuple(found)


def _eviction(graph: Graph, steps: Sequence[Op], step: int, storage: int, before: int) -> Eviction:
    """The absence of `storage` since `before` that ends with the unpacking that starts at `step`."""
    instance = _from_to(graph, steps[step])[1]
    back = step
    for k in range(step + 1, len(steps)):
        op = steps[k]
        if instance not in graph.touched(op):
            continue
        if not _ours(op.name):
            back = k
            break
        source, filled = _from_to(graph, op)
        instance = filled if source == instance else instance
    return Eviction(
        storage=graph.storages[storage].name,
        instance=graph.storages[instance].name,
        action=Action.COMPRESS,
        nbytes=graph.storages[storage].nbytes,
        evicted_access=before,
        in_trigger=step,
        back_access=back,
    )


def _from_to(graph: Graph, op: Op) -> tuple[int, int]:
    """The storages that one of our ops reads first, and that it writes."""
    return graph.values[op.reads[0]].storage, graph.written(op)[0]


def _ours(name: str) -> bool:
    return any(part in name for part in (PACKING, PACKED, UNPACKED, UNPACKING))
