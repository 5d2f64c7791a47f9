"""Finds the saved activations that are compressed, by the names that tracing gives to the compressing ops."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.core.evictions import Action, Eviction
from memplan.core.graph import Graph, Op

PACKING, PACKED = (
    "_packing",
    "_packed_as_",
)  # compressing ops; the last one is "_packed_as_" + format
UNPACKED, UNPACKING = "_unpacked_as_", "_unpacking"  # decompressing ops; the first one has the former


def compressions_of(graph: Graph, order: Sequence[int]) -> tuple[Eviction, ...]:
    """Return every storage that is compressed and decompressed, in the order of decompression; steps are positions in
    `order`.

    `Eviction.instance` is the storage with the decompressed contents. The compressed form is a third storage.
    """
    steps = [graph.ops[i] for i in order]
    packed: dict[int, tuple[int, int]] = {}  # compressed storage -> (its source, the step of the source's last use)
    last: dict[int, int] = {}
    found = []
    for step, op in enumerate(steps):
        if not _is_compression(op.name):
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
    """Return the eviction of `storage` from step `before` until the decompression that starts at `step`."""
    instance = _from_to(graph, steps[step])[1]
    back = step
    for k in range(step + 1, len(steps)):
        op = steps[k]
        if instance not in graph.touched(op):
            continue
        if not _is_compression(op.name):
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
    """Return the storage that a compressing or decompressing op reads first, and the one that it writes."""
    return graph.values[op.reads[0]].storage, graph.written(op)[0]


def _is_compression(name: str) -> bool:
    """Return whether an op of this name compresses or decompresses a storage."""
    return any(part in name for part in (PACKING, PACKED, UNPACKED, UNPACKING))
