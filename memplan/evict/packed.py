"""Storages that wait in fewer bytes: found in a graph by the names that `trace/pack.py` gives to its ops."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.evict.record import Action, Eviction
from memplan.graph import Graph

PACKING, PACKED = "_packing", "_packed_bits"
UNPACKED, UNPACKING = "_unpacked_bits", "_unpacking"


def compressions_of(graph: Graph, order: Sequence[int]) -> tuple[Eviction, ...]:
    """Every storage that is packed and unpacked, in the order of its return; steps are positions in `order`.

    The instance is the storage that holds it again; the bytes of its packed form are those of another storage.
    """
    steps = [graph.ops[i] for i in order]
    packed: dict[int, tuple[int, int]] = {}  # packed storage -> (what it was made of, last use of that)
    last: dict[int, int] = {}
    found = []
    for step, op in enumerate(steps):
        if PACKED in op.name:
            source, bits = graph.values[op.reads[0]].storage, graph.written(op)[0]
            packed[bits] = source, last.get(source, step)
        elif UNPACKED in op.name:
            bits, instance = graph.values[op.reads[0]].storage, graph.written(op)[0]
            uses = [k for k, o in enumerate(steps) if k > step and instance in graph.touched(o) and not _ours(o.name)]
            source, before = packed.get(bits, (bits, step))
            found.append(
                Eviction(
                    storage=graph.storages[source].name,
                    instance=graph.storages[instance].name,
                    action=Action.COMPRESS,
                    nbytes=graph.storages[source].nbytes,
                    evicted_access=before,
                    in_trigger=step,
                    back_access=uses[0] if uses else step,
                )
            )
        elif not _ours(op.name):
            last.update(dict.fromkeys(graph.touched(op), step))
    return tuple(found)


def _ours(name: str) -> bool:
    return any(part in name for part in (PACKING, PACKED, UNPACKED, UNPACKING))
