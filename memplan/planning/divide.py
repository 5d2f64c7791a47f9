"""Makes the graph of several devices: each storage is on one device, and a transfer copies it to another that reads it.

A transfer is two ops, `memplan.send` and `memplan.send_wait`, like a copy to the host. It starts a fixed number of ops
before its first reader, or as soon as the bytes are written. It makes a storage of its own ("gelu on cuda:1"), which
later ops on that device read too, until the original changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memplan.core.evictions import RELOAD, RELOAD_WAIT, SEND, SEND_WAIT, TRANSFERS
from memplan.core.graph import Graph, Op, Phase
from memplan.core.graph_edit import GraphEdit, with_values

_AHEAD = 16  # ops: a transfer starts at most this many ops before its first reader


def devices_of(graph: Graph, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the device of each op: that of `wanted`, except that all writers of a storage are on the device of the
    first.

    Copies to and from the host have -1, because they follow their storage.
    """
    parent = list(range(len(graph.ops)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    writer: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.target not in TRANSFERS:
            for s in graph.written(op):
                one, two = root(writer.setdefault(s, i)), root(i)
                parent[max(one, two)] = min(one, two)
    return tuple(-1 if op.target in TRANSFERS else wanted[root(i)] for i, op in enumerate(graph.ops))


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The graph that runs on several devices; `sources` are those of `EvictionPlan`."""

    graph: Graph
    sources: tuple[int, ...]


def divide(graph: Graph, sources: Sequence[int], device_of: Sequence[int], names: Sequence[str]) -> Divided:
    """Return `graph`, whose ops are in schedule order, with op i on device `names[device_of[i]]` and with transfers."""
    builder = _PartitionBuilder(graph, tuple(device_of), tuple(names))
    for i, op in enumerate(graph.ops):
        builder.op(i, op, sources[i])
    return builder.finish()


@dataclass(slots=True)
class _PartitionBuilder:
    """Builds the graph of several devices, op by op."""

    graph: Graph
    device_of: tuple[int, ...]
    names: tuple[str, ...]
    edit: GraphEdit = field(init=False)
    home: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)  # storage -> the position after its last writer
    copies: dict[tuple[int, int], int] = field(default_factory=dict)  # (storage, device) -> its copy there, still valid
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    ops: list[tuple[Op, int]] = field(default_factory=list)
    sends: list[tuple[int, Op]] = field(default_factory=list)  # (the position before which the op goes, op)

    def __post_init__(self) -> None:
        self.edit = GraphEdit(self.graph)
        self.home = _homes(self.graph, self.device_of)
        for s, device in self.home.items():
            self.edit.storages[s] = replace(self.edit.storages[s], device=self.names[device])

    def op(self, index: int, op: Op, source: int) -> None:
        """Append one op, after the transfers that it waits for."""
        device = self.device_of[index]
        written = self.graph.written(op)
        if device >= 0:
            new = {v: self._on_device(v, device, op) for v in op.reads if self.graph.values[v].storage not in written}
            new |= {v: v for v in (*op.reads, *op.writes) if v not in new}
            op = with_values(op, new.__getitem__)
        for s in written:
            self.written[s] = len(self.ops) + 1
            for there in range(len(self.names)):
                self.copies.pop((s, there), None)
        self.ops.append((op, source))

    def finish(self) -> Divided:
        """Return the finished graph, with every send at its position."""
        before: dict[int, list[Op]] = {}
        for position, op in self.sends:
            before.setdefault(position, []).append(op)
        edit = self.edit
        for position, (op, source) in enumerate(self.ops):
            late = op.phase if not edit.ops or edit.ops[-1].phase is Phase.BACKWARD else Phase.FORWARD
            for send in before.get(position, ()):
                edit.add(replace(send, phase=late))
            edit.add(op, source)
        return Divided(graph=edit.finish(), sources=tuple(edit.sources))

    def _on_device(self, v: int, device: int, op: Op) -> int:
        """Return the value that `op` on `device` reads for value `v`: `v` itself, or its copy on that device."""
        s = self.graph.values[v].storage
        if self.home.get(s, device) == device:
            return v
        if (s, device) not in self.copies:
            self.copies[s, device] = self._sent(s, device, op)
        copy = self.copies[s, device]
        return self.edit.view(v, copy, f"{self.graph.values[v].name}@{copy}")

    def _sent(self, s: int, device: int, op: Op) -> int:
        """Return a new copy of storage `s` on `device`, with its send and its wait, which is appended here."""
        count = self.counts[s, device] = self.counts.get((s, device), 0) + 1
        base = self.edit.storages[s]
        name = f"{base.name} on {self.names[device]}{f' ({count})' if count > 1 else ''}"
        copy = self.edit.storage(replace(base, name=name, device=self.names[device]))
        source, destination = self.edit.whole(s, "sent"), self.edit.whole(copy, "sent")
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
        start = max(self.written.get(s, 0), len(self.ops) - _AHEAD)
        self.sends.append((start, send))
        wait = replace(send, name=f"send_wait:{name}", target=SEND_WAIT, reads=(source, destination))
        self.ops.append((wait, -1))
        return copy


def _homes(graph: Graph, device_of: Sequence[int]) -> dict[int, int]:
    """Return the device of each planned storage: its writers', or its first reader's if it comes from the host."""
    writers: dict[int, int] = {}
    readers: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        if op.target in TRANSFERS:
            continue
        written = graph.written(op)
        for s in graph.touched(op):
            if graph.storages[s].planned:
                (writers if s in written else readers).setdefault(s, device_of[i])
    moved = {
        graph.values[v].storage
        for op in graph.ops
        if op.target in (RELOAD, RELOAD_WAIT)
        for v in op.writes
        if graph.storages[graph.values[v].storage].planned
    }
    return {s: writers.get(s, readers.get(s, 0)) for s in {**writers, **readers, **dict.fromkeys(moved)}}
