"""An independent check of evictions: interprets both graphs symbolically and requires that they compute the same.

It shares no code with the policies. The symbolic content of a storage is the op that wrote it and that op's operands.
An op of the evicted graph must find in its operands exactly what the traced op finds, and the caller must be left with
the same contents. Copies are asynchronous: their source must not change, and their destination must not be used, before
the wait. The symbolic state of the random generator is the number of random ops that have run; an op that draws again
must read the state that its first run found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from memplan.core.collectives import WAIT, is_collective
from memplan.core.evictions import OFFLOAD, RELOAD, RELOAD_WAIT, SAVE_RNG, SEND, SEND_WAIT, TRANSFERS
from memplan.core.graph import Graph, Op, StorageKind, Value
from memplan.errors import InvalidEviction

_HINT = "this is a mistake of the policy that made the plan; please report it, or use policy='auto'"
_Content = int


@dataclass(slots=True)
class _Names:
    """Numbers symbolic contents: equal descriptions get equal numbers."""

    known: dict[object, _Content] = field(default_factory=dict)

    def __call__(self, *description: object) -> _Content:
        return self.known.setdefault(description, len(self.known))


@dataclass(slots=True)
class _Run:
    """A symbolic run of a graph: `content` is what each storage holds, `flying` are the copies under way."""

    graph: Graph
    names: _Names
    content: dict[int, _Content] = field(default_factory=dict)
    flying: dict[tuple[int, int], str] = field(default_factory=dict)  # (from, to) -> the op that started the copy

    def operands(self, op: Op) -> tuple[_Content, ...]:
        return tuple(self._content(self.graph.values[v].storage) for v in op.reads)

    def op(self, op: Op, source: int) -> None:
        """Run an op that computes: update the contents that it writes."""
        operands = self.operands(op)
        for k, v in enumerate(op.writes):
            value = self.graph.values[v]
            whole = v not in op.reads and _whole(self.graph, value)
            before = None if whole else self._content(value.storage)
            related = tuple(c for r, c in zip(op.reads, operands, strict=True) if (v, r) not in op.unrelated)
            self.content[value.storage] = self.names("op", source, k, related, before)

    def found(self, op: Op, *, recompute: bool) -> object:
        """Return what an op finds in its operands; of a recompute, only in those that all its results depend on."""
        immaterial = {r for _, r in op.unrelated} if recompute else set()
        pairs = zip(op.reads, self.operands(op), strict=True)
        return tuple(-1 if r in immaterial else content for r, content in pairs)

    def copy(self, op: Op) -> None:
        """Start a copy, or wait for one."""
        starts = op.target in (OFFLOAD, RELOAD, SEND)
        pair = self._ends(op, waits=not starts)
        if starts:
            self.require_idle(op)
            self.flying[pair] = op.name
        elif self.flying.pop(pair, None) is None:
            raise _fault(op, f"waits for a copy of {self._name(pair[0])} to {self._name(pair[1])} that was not started")
        else:
            self.content[pair[1]] = self._content(pair[0])

    def begin(self, op: Op) -> None:
        """Note that a collective has started, whose result is there only when it was waited for."""
        if not is_collective(op.target) or len(op.reads) != 1 or len(op.writes) != 1:
            raise _fault(op, "is no collective that could be waited for")
        self.flying[self._pair_of(op)] = op.name

    def arrive(self, op: Op) -> None:
        """Wait for a collective that was started."""
        if len(op.writes) != 1 or len(op.reads) != 2 or op.reads[1:] != op.writes:
            raise _fault(op, "does not wait for a result and what it was made from")
        if self.flying.pop(self._pair_of(op), None) is None:
            raise _fault(op, f"waits for {self._name(self._pair_of(op)[1])}, which was not started")

    def _pair_of(self, op: Op) -> tuple[int, int]:
        """Return the storages that an op reads first, and writes."""
        return self.graph.values[op.reads[0]].storage, self.graph.values[op.writes[0]].storage

    def save(self, op: Op, drawn: int) -> None:
        """Save the generator's state after `drawn` random ops."""
        value = self.graph.values[op.writes[0]] if len(op.writes) == 1 else None
        if value is None or op.reads or not op.random or not _is_state(self.graph, value):
            raise _fault(op, "does not save the state of the random generator")
        self.require_idle(op)
        self.content[value.storage] = self.names("generator", drawn)

    def require_state(self, op: Op, drawn: int) -> None:
        """Raise unless `op` draws again with the generator's state after `drawn` random ops."""
        state = self.graph.saved_state(op)
        if state is None or op.random or not _is_state(self.graph, self.graph.values[state]):
            raise _fault(op, "draws random numbers again, without the generator's saved state")
        if self._content(self.graph.values[state].storage) != self.names("generator", drawn):
            raise _fault(op, "does not draw with the generator's state right before its first run")

    def require_idle(self, op: Op) -> None:
        """Raise if a copy still writes an operand of `op`, or still reads what `op` writes."""
        if not self.flying:
            return
        touched, written = self.graph.touched(op), self.graph.written(op)
        for (source, destination), name in self.flying.items():
            if destination in touched:
                raise _fault(op, f"uses {self._name(destination)} before {name} has ended")
            if source in written:
                raise _fault(op, f"changes {self._name(source)} while {name} copies it")

    def _ends(self, op: Op, *, waits: bool) -> tuple[int, int]:
        """Return the (source, destination) storages of a copy, and check that it copies all bytes of the source."""
        values = self.graph.values
        expected = (*op.reads[:1], *op.writes) if waits else op.reads
        if op.target not in TRANSFERS or len(op.writes) != 1 or len(op.reads) != 1 + waits or op.reads != expected:
            raise _fault(op, "is not a copy from one storage to another")
        pair = values[op.reads[0]].storage, values[op.writes[0]].storage
        from_host = op.target in (RELOAD, RELOAD_WAIT)
        source, destination = (self.graph.storages[s] for s in pair)
        all_bytes = ("uint8", (source.nbytes,), (1,), 0)
        layouts = {(v.dtype, v.shape, v.strides, v.offset) for v in (values[i] for i in (*op.reads, *op.writes))}
        if layouts != {all_bytes} or source.nbytes != destination.nbytes:
            raise _fault(op, "does not copy all bytes of a storage to another of its size")
        if op.target in (SEND, SEND_WAIT):
            if not (source.planned and destination.planned and source.device != destination.device):
                raise _fault(op, "is not between the arenas of two devices")
        elif (source.planned, destination.planned) != (not from_host, from_host):
            raise _fault(op, "is not between the arena and the host")
        return pair

    def _content(self, storage: int) -> _Content:
        if storage not in self.content:
            s = self.graph.storages[storage]
            made = s.planned or s.kind in (StorageKind.OUTPUT, StorageKind.GRADIENT)
            self.content[storage] = self.names("never written" if made else ("given", storage))
        return self.content[storage]

    def _name(self, storage: int) -> str:
        return self.graph.storages[storage].name


def require_equivalent(traced: Graph, evicted: Graph, sources: Sequence[int]) -> None:
    """Raise `InvalidEviction`, naming the first op of `evicted` that would compute something else than in `traced`.

    `sources` maps the ops of `evicted` to those of `traced`, -1 for copies and for ops that save the generator's state.
    `evicted` has the values and storages of `traced` at the same indices, and more after them.
    """
    names = _Names()
    base = _Run(traced, names)
    expected: list[tuple[object, ...]] = []
    for i, op in enumerate(traced.ops):
        expected.append((base.found(op, recompute=False), base.found(op, recompute=True), _layouts(traced, op)))
        base.op(op, i)
    run = _Run(evicted, names)
    drawn_before = {i: n for n, i in enumerate(i for i, op in enumerate(traced.ops) if op.random)}
    times = [0] * len(traced.ops)
    randoms: list[int] = []
    if len(sources) != len(evicted.ops):
        raise InvalidEviction(f"{len(sources)} sources for {len(evicted.ops)} ops", where="sources", hint=_HINT)
    for op, source in zip(evicted.ops, sources, strict=True):
        if source < 0:
            if op.target == SAVE_RNG:
                run.save(op, len(randoms))
            elif op.target == WAIT:
                run.arrive(op)
            else:
                run.copy(op)
            continue
        if source >= len(traced.ops) or traced.ops[source].target != op.target:
            raise _fault(op, "is not an op of the traced graph")
        run.require_idle(op)
        recompute = times[source] > 0
        if recompute and source in drawn_before:
            run.require_state(op, drawn_before[source])
            op = replace(op, reads=op.reads[:-1])  # noqa: PLW2901
        elif op.random != traced.ops[source].random:
            raise _fault(op, "draws random numbers where the traced op does not, or the other way round")
        results = run.found(op, recompute=recompute), _layouts(evicted, op)
        if results != (expected[source][recompute], expected[source][2]):
            raise _fault(op, f"does not find what {traced.ops[source].name} does")
        run.op(op, source)
        if op.starts:
            run.begin(op)
        times[source] += 1
        randoms += [source] if op.random else []
    _require_once(traced, times, randoms)
    _require_results(traced, evicted, base, run)


def _require_once(traced: Graph, times: Sequence[int], randoms: Sequence[int]) -> None:
    """Raise unless every op runs, ops with visible side effects run once, and random ops keep their order."""
    seen = {i for i, s in enumerate(traced.storages) if not s.planned} - traced.released
    seen |= {traced.values[v].storage for v in traced.gradients}
    for op, count in zip(traced.ops, times, strict=True):
        shows = op.only_raises or not seen.isdisjoint(traced.written(op))
        if count < 1 or (count > 1 and shows):
            raise _fault(op, f"runs {count} times")
    if list(randoms) != sorted(randoms):
        raise InvalidEviction("random ops run in another order", where="evicted graph", hint=_HINT)


def _require_results(traced: Graph, evicted: Graph, base: _Run, run: _Run) -> None:
    """Raise unless the caller and the model hold the same contents at the end and no copy is under way."""
    if run.flying:
        raise InvalidEviction("a copy is still under way at the end", where="evicted graph", hint=_HINT)
    if (traced.outputs, traced.gradients) != (evicted.outputs, evicted.gradients):
        raise InvalidEviction("returns other values", where="evicted graph", hint=_HINT)
    returned = {traced.values[v].storage for v in traced.gradients}
    for index, storage in enumerate(traced.storages):
        if (not storage.planned or index in returned) and base._content(index) != run._content(index):
            raise InvalidEviction("is left with another content", where=storage.name, hint=_HINT)


def _is_state(graph: Graph, value: Value) -> bool:
    """Return whether a value is a whole planned storage for the state of a generator."""
    storage = graph.storages[value.storage]
    whole = (value.dtype, value.shape, value.strides, value.offset) == ("uint8", (storage.nbytes,), (1,), 0)
    return whole and storage.planned and storage.kind is StorageKind.RNG_STATE


def _layouts(graph: Graph, op: Op) -> tuple[object, ...]:
    values = (graph.values[v] for v in (*op.reads, *op.writes))
    return tuple((v.dtype, v.shape, v.strides, v.offset) for v in values)


def _whole(graph: Graph, value: Value) -> bool:
    """Return whether the value covers all bytes of its storage, which expanded values do not."""
    nbytes = prod(value.shape) * value.itemsize
    return value.offset == 0 and value.dense and nbytes >= graph.storages[value.storage].nbytes


def _fault(op: Op, what: str) -> InvalidEviction:
    return InvalidEviction(what, where=op.name, hint=_HINT)
