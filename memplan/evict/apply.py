"""Builds the graph that a sequence of events describes: recomputes and copies become ordinary ops.

Each time that a storage gets bytes again, by a recompute or a reload, is a further *life* of it, and is a storage of
its own in the new graph ("gelu@1"). The traced graph's values and storages keep their indices, so that bindings to
them stay valid; further lives are appended. An offload and its reload are four ops, `memplan.offload`, `offload_wait`,
`reload` and `reload_wait`; the live interval of the bytes covers the whole copy because these ops touch them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT
from memplan.core.graph import Graph, Op, Phase, Storage, StorageKind
from memplan.core.graph_edit import GraphEdit, with_values
from memplan.errors import InvalidEviction
from memplan.evict.workload import Event, Kind, Workload

_NAMES = {
    Kind.OFFLOAD: OFFLOAD,
    Kind.OFFLOADED: OFFLOAD_WAIT,
    Kind.RELOAD: RELOAD,
    Kind.RELOADED: RELOAD_WAIT,
}


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The graph with evictions, its ops in the order in which they run; `sources` and `instances` as in
    `EvictionPlan`.
    """

    graph: Graph
    sources: tuple[int, ...]
    instances: tuple[tuple[int, int], ...]


def apply(workload: Workload, events: Iterable[Event]) -> Applied:
    """Return the graph of `events`. Raises `InvalidEviction`, which names the first impossible event."""
    builder = _GraphBuilder(workload)
    for position, event in enumerate(events):
        builder.take(position, event)
    return builder.finish()


@dataclass(slots=True)
class _StorageState:
    """The current life of a storage: where its bytes are, as indices of the new graph's storages."""

    device: int | None = None
    host: int | None = None
    written: int = 0  # how many of its writers have run
    dropped: bool = False
    away: bool = False  # offloaded, and to be reloaded
    clean: bool = False  # the host has the same bytes
    copying: Kind | None = None


@dataclass(slots=True)
class _GraphBuilder:
    """Takes one event after the other, checks that it is possible, and appends its op to the new graph."""

    workload: Workload
    edit: GraphEdit = field(init=False)
    instances: list[tuple[int, int]] = field(default_factory=list)  # (base storage, its further life)
    lives: list[_StorageState] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    waiting: dict[int, list[int]] = field(default_factory=dict)  # storage -> ops of the host that wait for its offload
    copies: dict[int, int] = field(default_factory=dict)  # storage -> the number of its further lives
    due: set[int] = field(default_factory=set)  # storages that the forward changed and that are not back on the host
    forward_left: int = 0
    backward: bool = False

    def __post_init__(self) -> None:
        g, w = self.workload.graph, self.workload
        self.edit = GraphEdit(g)
        self.ran = [0] * len(g.ops)
        self.forward_left = g.forward_ops
        self.lives = [_StorageState(device=None if i in w.held else i) for i in range(len(g.storages))]
        for s in w.host_resident - w.fresh:
            self.lives[s].host, self.lives[s].clean = s, True

    # -- events ------------------------------------------------------------------------------------------

    def take(self, position: int, event: Event) -> None:
        where = f"event {position} ({event.kind.name.lower()} {self._name(event)})"
        if event.kind is Kind.RUN:
            self._run(event.of, where)
        elif event.kind is Kind.DROP:
            life = self._on_device(event.of, where)
            if not life.clean and not self.workload.recomputable[event.of]:
                raise InvalidEviction("its bytes cannot be had again", where=where)
            life.dropped = True
        else:
            self._copy(event, where)

    def finish(self) -> Applied:
        g = self.workload.graph
        for i, count in enumerate(self.ran):
            if not count:
                raise InvalidEviction("never runs", where=f"op {g.ops[i].name}")
        return Applied(graph=self.edit.finish(), sources=tuple(self.edit.sources), instances=tuple(self.instances))

    def _run(self, index: int, where: str) -> None:
        op, recompute = self.workload.graph.ops[index], self.ran[index] > 0
        if op.on_host:
            awaited = self.workload.awaited[index]
            if awaited >= 0 and (self.lives[awaited].host is None or not self.lives[awaited].clean):
                self.waiting.setdefault(awaited, []).append(index)
                return
            self._emit(op, self.workload.sources[index], op.phase, where)
            self.ran[index] += 1
            return
        state = self.workload.graph.saved_state(op)
        if recompute and op.random and state is None:
            raise InvalidEviction("it draws random numbers, and would draw others", where=where)
        if state is not None:  # the first run draws from the generator, the others from the saved state
            op = replace(op, random=False) if recompute else replace(op, reads=op.reads[:-1])
        touched = self.workload.graph.values
        reads = tuple(self._value(v, self._readable(touched[v].storage, where)) for v in op.reads)
        target = {s: self._writable(s, index, recompute, where) for s in self.workload.graph.written(op)}
        writes = tuple(self._value(v, target[touched[v].storage]) for v in op.writes)
        if not recompute and op.phase is Phase.FORWARD:
            self.forward_left -= 1
            self.due |= self.workload.due.intersection(target)
        name = f"{op.name}@{self.ran[index]}" if recompute else op.name
        phase = None if recompute else op.phase
        new = dict(zip((*op.reads, *op.writes), (*reads, *writes), strict=True))
        op = replace(with_values(op, new.__getitem__), name=name, reads=reads, writes=writes)
        self._emit(op, self.workload.sources[index], phase, where)
        self.ran[index] += 1

    def _copy(self, event: Event, where: str) -> None:
        s, life = event.of, self.lives[event.of]
        if event.kind in (Kind.OFFLOAD, Kind.OFFLOADED):
            self._on_device(s, where)
        starts = event.kind in (Kind.OFFLOAD, Kind.RELOAD)
        if starts and life.copying is not None:
            raise InvalidEviction("another copy of it is under way", where=where)
        if not starts and life.copying is not Kind(event.kind - 1):
            raise InvalidEviction("no such copy was started", where=where)
        if event.kind is Kind.OFFLOAD and life.host is None:
            life.host = s if s in self.workload.fresh else self._host_copy(s)
        if event.kind is Kind.RELOAD:
            if life.host is None or (life.device is not None and not life.dropped):
                raise InvalidEviction("there is no copy of it on the host, or it never left", where=where)
            life.device = self._instance(s)
        assert life.host is not None
        assert life.device is not None
        device, host = self.edit.whole(life.device), self.edit.whole(life.host)
        base = self.workload.graph.storages[s]
        reads, writes = {
            Kind.OFFLOAD: ((device,), (host,)),
            Kind.OFFLOADED: ((device, host), (host,)),
            Kind.RELOAD: ((host,), (device,)),
            Kind.RELOADED: ((host, device), (device,)),
        }[event.kind]
        op = Op(
            name=f"{_NAMES[event.kind].removeprefix('memplan.')}:{self.edit.storages[life.device].name}",
            target=_NAMES[event.kind],
            phase=Phase.FORWARD,
            reads=reads,
            writes=writes,
            direct=True,
            random=False,
            origin=base.origin,
        )
        early = event.kind is Kind.OFFLOAD and not self.backward  # the forward's results may be offloaded during it
        self._emit(op, -1, Phase.FORWARD if early else None, where)
        if event.kind is Kind.OFFLOADED:
            self.due.discard(s)
        if event.kind is Kind.RELOAD and s in self.workload.late and not self.backward:
            raise InvalidEviction("it is given when the backward begins", where=where)
        life.copying = event.kind if starts else None
        life.clean = life.clean or event.kind is Kind.OFFLOADED
        life.away = event.kind is Kind.OFFLOADED or (life.away and event.kind is Kind.RELOAD)
        life.dropped = event.kind is Kind.OFFLOADED or (life.dropped and event.kind is not Kind.RELOADED)
        for index in self.waiting.pop(s, ()) if event.kind is Kind.OFFLOADED else ():
            self._run(index, where)

    # -- where things are --------------------------------------------------------------------------------

    def _on_device(self, s: int, where: str) -> _StorageState:
        life = self.lives[s]
        if life.device is None or life.dropped or life.copying is Kind.RELOAD:
            raise InvalidEviction("its bytes are not on the device", where=where)
        return life

    def _readable(self, s: int, where: str) -> int:
        device = self._on_device(s, f"{where}: {self.workload.graph.storages[s].name}").device
        assert device is not None
        return device

    def _writable(self, s: int, index: int, recompute: bool, where: str) -> int:
        """Return the storage that a run writes: the current life, a new one, or memory that is discarded."""
        life, name = self.lives[s], self.workload.graph.storages[s].name
        if life.copying is not None and not recompute:
            raise InvalidEviction(f"it writes {name} while that is being copied", where=where)
        place = self.workload.writers[s].index(index)
        absent = life.device is None or life.dropped
        if recompute and not self.workload.recomputable[s]:
            raise InvalidEviction(f"it would change {name} twice", where=where)
        life.clean = life.clean and recompute
        if life.copying is None and not absent and life.written == place:
            life.written += 1
        elif absent and place == 0 and not life.away and life.copying is None and (recompute or not life.dropped):
            further = recompute or s in self.workload.host_resident
            life.device, life.written, life.dropped = (self._instance(s) if further else s), 1, False
        elif recompute and (life.away or life.copying is not None or not absent):
            return self._instance(s)
        elif s not in self.workload.host_resident or absent:
            raise InvalidEviction(f"{name} does not hold what its earlier writers wrote", where=where)
        assert life.device is not None
        return life.device

    # -- making things -----------------------------------------------------------------------------------

    def _emit(self, op: Op, source: int, phase: Phase | None, where: str) -> None:
        """Append an op. With `phase` None it belongs to the phase that the step is in.

        The backward begins when all ops of the forward have run and the caller's storages that they changed are back
        on the host.
        """
        if phase is None:
            late = self.backward or (self.forward_left == 0 and not self.due and self._has_backward)
            phase = Phase.BACKWARD if late else Phase.FORWARD
        if phase is Phase.BACKWARD and self.due:
            name = self.workload.graph.storages[min(self.due)].name
            raise InvalidEviction(f"the forward changed {name}, which is not back on the host", where=where)
        self.backward = self.backward or phase is Phase.BACKWARD
        self.edit.add(replace(op, phase=phase), source)

    @property
    def _has_backward(self) -> bool:
        return self.workload.graph.forward_ops < len(self.workload.graph.ops)

    def _instance(self, s: int) -> int:
        base = self.workload.graph.storages[s]
        self.copies[s] = self.copies.get(s, 0) + 1
        device = self.workload.device or base.device
        name = f"{base.name}@{self.copies[s]}"
        self.instances.append((s, self.edit.storage(replace(base, name=name, planned=True, device=device))))
        return self.instances[-1][1]

    def _host_copy(self, s: int) -> int:
        base = self.workload.graph.storages[s]
        host = replace(base, name=f"{base.name}@host", kind=StorageKind.HOST, planned=False, device="cpu")
        return self.edit.storage(host)

    def _value(self, v: int, storage: int) -> int:
        """Return value `v` as a view of another life of its storage."""
        life = self.edit.storages[storage].name.rpartition("@")[2]
        return self.edit.view(v, storage, f"{self.edit.values[v].name}@{life}")

    def _name(self, event: Event) -> str:
        g = self.workload.graph
        table: tuple[Op, ...] | tuple[Storage, ...] = g.ops if event.kind is Kind.RUN else g.storages
        if not 0 <= event.of < len(table):
            raise InvalidEviction(f"names {event.kind.name.lower()} {event.of}, which is not there", where="events")
        return table[event.of].name
