"""Makes the graph of several devices: each storage is on one device, and a transfer copies it to another that reads it.

A transfer is two ops, `memplan.send` and `memplan.send_wait`, like a copy to the host. They come before its first
reader, since a device waits for what the one before it computes. The copy is a storage of its own ("gelu on cuda:1"),
which later ops on that device read too, until the original changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memplan.core.evictions import SEND, SEND_WAIT, TRANSFERS
from memplan.core.graph import Graph, Op
from memplan.core.graph_edit import GraphEdit, with_values


def devices_of(graph: Graph, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the device of each op: that of `wanted`, except that all writers of a storage are on one.

    Copies to and from the host have -1, because they follow their storage.
    """
    home: dict[int, int] = {}
    found, before = list[int](), None
    while found != before:  # an op that writes several storages may bring them together
        before, found = found, []
        for op, device in zip(graph.ops, wanted, strict=True):
            written = graph.written(op) if op.target not in TRANSFERS else ()
            there = min((home[s] for s in written if s in home), default=device)
            home.update(dict.fromkeys(written, there))
            found.append(there if op.target not in TRANSFERS else -1)
    return tuple(found)


def divide(
    graph: Graph, sources: Sequence[int], device_of: Sequence[int], names: Sequence[str]
) -> tuple[Graph, tuple[int, ...]]:
    """Return `graph`, whose ops are in schedule order, with op i on device `names[device_of[i]]` and with transfers.

    With it come its sources, as those of `EvictionPlan`.
    """
    edit, home = GraphEdit(graph), _homes(graph, device_of)
    for s, device in home.items():
        edit.storages[s] = replace(edit.storages[s], device=names[device])
    copies: dict[tuple[int, int], int] = {}  # (storage, device) -> its copy there, still valid
    counts = Counter[tuple[int, int]]()

    def on_device(v: int, device: int, op: Op) -> int:
        """Return the value that `op` on `device` reads for value `v`: `v` itself, or its copy on that device."""
        s = graph.values[v].storage
        if home.get(s, device) == device:
            return v
        if (s, device) not in copies:
            copies[s, device] = sent(s, device, op)
        return edit.view(v, copies[s, device], f"{graph.values[v].name}@{copies[s, device]}")

    def sent(s: int, device: int, op: Op) -> int:
        """Return a new copy of storage `s` on `device`, with its send and its wait, which are appended here."""
        counts[s, device] += 1
        base, count = edit.storages[s], counts[s, device]
        name = f"{base.name} on {names[device]}{f' ({count})' if count > 1 else ''}"
        copy = edit.storage(replace(base, name=name, device=names[device]))
        source, destination = edit.whole(s, "sent"), edit.whole(copy, "sent")
        send = Op(
            name=f"send:{name}",
            target=SEND,
            phase=op.phase,
            reads=(source,),
            writes=(destination,),
            direct=True,
            random=False,
            origin=base.origin,
        )
        edit.add(send)
        edit.add(replace(send, name=f"send_wait:{name}", target=SEND_WAIT, reads=(source, destination)))
        return copy

    for op, device, source in zip(graph.ops, device_of, sources, strict=True):
        written = graph.written(op)
        if device >= 0:
            new = {v: on_device(v, device, op) for v in op.reads if graph.values[v].storage not in written}
            new |= {v: v for v in (*op.reads, *op.writes) if v not in new}
            edit.add(with_values(op, new.__getitem__), source)
        else:
            edit.add(op, source)
        for s in written:
            for there in range(len(names)):
                copies.pop((s, there), None)
    return edit.finish(), tuple(edit.sources)


def _homes(graph: Graph, device_of: Sequence[int]) -> dict[int, int]:
    """Return the device of each planned storage: its writers', or its first reader's if it comes from the host."""
    found: dict[int, int] = {}
    for touched in (graph.written, graph.touched):
        for i, op in enumerate(graph.ops):
            for s in touched(op) if op.target not in TRANSFERS else ():
                if graph.storages[s].planned:
                    found.setdefault(s, device_of[i])
    return found
