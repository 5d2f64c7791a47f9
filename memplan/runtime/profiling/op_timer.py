"""Measured execution: an `OpTimer` times each op of a program.

It counts whole steps only: a step that ends early, or whose backward is never called, is not counted.
A `Measurement` has the medians.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.plan import Plan
from memplan.devices.host_memory import unlock_unused
from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import new_event, record
from memplan.errors import UnknownName
from memplan.evict.costs import CostModel, signature_of
from memplan.evict.feedback import link_of
from memplan.runtime.copies.copies import Copy, Direction
from memplan.runtime.debug.sanitizers import Sanitizers
from memplan.runtime.execute.program import Program
from memplan.runtime.memory.arena import Arena, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAccess:
    """One access of an op to a storage, at `step` of the schedule, `seconds` after the training step began."""

    op: str
    step: int
    seconds: float
    writes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """All accesses of one storage, with the op that produced it first and the storages that this op read.

    Recomputed and reloaded instances of the storage count too. `nbytes` is its size.
    """

    storage: str
    nbytes: int
    producer: str
    inputs: tuple[str, ...]
    accesses: tuple[StorageAccess, ...]

    @property
    def count(self) -> int:
        """The number of ops of a step that access the storage, recomputes and copies included."""
        return len(self.accesses)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """A copy of `storage` (an index), the `nth` of that storage in its direction.

    `started` and `waited` are steps of the schedule, `seconds` is the time of the copy, and `stall` that of its wait.
    """

    storage: int
    name: str
    nth: int
    direction: Direction
    started: int
    waited: int
    nbytes: int
    seconds: float
    stall: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured seconds of a plan, as medians over training steps.

    Attributes:
        plan: The plan that was measured.
        samples: The number of measured training steps.
        begun: For each step of the schedule, when its op began, in seconds after the training step began.
        op_seconds: For each step of the schedule, the seconds of its op, waits included.
        copies: The times of the copies.
        costs: The measured costs, from which the next plan is made.
    """

    plan: Plan
    samples: int
    begun: tuple[float, ...]
    op_seconds: tuple[float, ...]
    copies: tuple[CopyTime, ...]
    costs: CostModel

    @property
    def seconds(self) -> float:
        """The seconds of one training step: all ops and waits, without the time between forward and backward."""
        return sum(self.op_seconds)

    @property
    def stall(self) -> float:
        """The part of `seconds` that is spent waiting for copies."""
        return sum(copy.stall for copy in self.copies)

    @property
    def late(self) -> tuple[CopyTime, ...]:
        """The reloads that ops had to wait for."""
        return tuple(c for c in self.copies if c.direction is Direction.TO_DEVICE and c.stall > 0)

    def accesses(self, name: str) -> Accesses:
        """Return all accesses of a storage, by its name in the plan without a budget.

        Raises `UnknownName` if there is no such storage.
        """
        graph, base = self.plan.graph, bases(self.plan)
        found: list[StorageAccess] = []
        made = None
        for step, index in enumerate(self.plan.schedule.order):
            op = graph.ops[index]
            if name not in {graph.storages[base(s)].name for s in graph.touched(op)}:
                continue
            writes = name in {graph.storages[base(s)].name for s in graph.written(op)}
            if writes and made is None and op.target not in TRANSFERS:
                made = op
            found.append(StorageAccess(op=op.name, step=step, seconds=self.begun[step], writes=writes))
        storage = next((s for s in graph.storages if s.name == name), None)
        if storage is None:
            raise UnknownName(f"no storage is called {name!r}", where="accesses", hint="see plan.graph.storages")
        read = () if made is None else dict.fromkeys(base(graph.values[v].storage) for v in made.reads)
        return Accesses(
            storage=name,
            nbytes=storage.nbytes,
            producer="" if made is None else made.name,
            inputs=tuple(graph.storages[s].name for s in read if graph.storages[s].name != name),
            accesses=tuple(found),
        )


def bases(plan: Plan) -> Callable[[int], int]:
    """Return a function from a storage to the storage of the traced graph that it is an instance of."""
    base: Mapping[int, int] = {instance: of for of, instance in plan.eviction.instances} if plan.eviction else {}
    return lambda storage: base.get(storage, storage)


PROBES = (1 << 12, 1 << 26)  # bytes of the copies that are timed if a step has too few, at most the size of the arena
_ROUNDS = 3  # copies of each size


@dataclass(frozen=True, slots=True)
class _TimedCopy:
    """A planned copy, and the steps of the schedule of its start and its wait."""

    storage: int
    nth: int
    direction: Direction
    started: int
    waited: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class _Sample:
    """One whole training step: when each op began and ended, and (bytes, seconds, stall) of each transfer."""

    begun: tuple[float, ...]
    ended: tuple[float, ...]
    copies: tuple[tuple[int, float, float], ...]


class _Marks(Protocol):
    """Points in time, two for each op."""

    def mark(self, index: int) -> Callable[[], None]:
        """Return a function that records point `index` when it is called."""

    def seconds(self) -> list[float]:
        """Return the seconds of each point after the first one."""


class OpTimer:
    """Times the whole steps of a program. Its runner calls `sanitizers` around each op (`Runner.time`)."""

    def __init__(self, program: Program) -> None:
        self.plan = program.plan
        self._device = program.traced.device
        self._transfers = tuple(_transfers(program))
        steps = len(self.plan.schedule.order)
        self._in_stream = is_accelerator(self._device)  # there the stream waits for copies, not the host
        self._marks: _Marks = _StreamMarks(2 * steps, self._device) if self._in_stream else _HostMarks(2 * steps)
        self._stalled = [0.0] * len(self._transfers)
        self._samples: list[_Sample] = []
        befores = [(self._marks.mark(2 * step),) for step in range(steps)]
        afters = [(self._marks.mark(2 * step + 1),) for step in range(steps)]
        if steps:
            befores[0] = (self._begin, *befores[0])  # type: ignore[assignment]
            afters[-1] = (*afters[-1], self._finish)  # type: ignore[assignment]
        self.sanitizers = Sanitizers(tuple(befores), tuple(afters))

    @property
    def samples(self) -> int:
        """The number of whole steps that were timed."""
        return len(self._samples)

    def measurement(self, base: CostModel, arena: Arena, *, skip: int = 0) -> Measurement:
        """Return the medians of all steps after the first `skip`; other costs are those of `base`.

        The arena must be free: if the steps had no copies of two sizes in a direction, copies are timed in it.
        """
        samples = self._samples[skip:]
        assert samples
        seconds = [median(s.ended[k] - s.begun[k] for s in samples) for k in range(len(samples[0].begun))]
        copies = tuple(
            CopyTime(
                storage=t.storage,
                name=self.plan.graph.storages[t.storage].name,
                nth=t.nth,
                direction=t.direction,
                started=t.started,
                waited=t.waited,
                nbytes=samples[0].copies[k][0],
                seconds=median(s.copies[k][1] for s in samples),
                stall=median(s.copies[k][2] for s in samples),
            )
            for k, t in enumerate(self._transfers)
        )
        return Measurement(
            plan=self.plan,
            samples=len(samples),
            begun=tuple(median(s.begun[k] for s in samples) for k in range(len(seconds))),
            op_seconds=tuple(seconds),
            copies=copies,
            costs=self._costs(base, seconds, copies, arena),
        )

    def _costs(self, base: CostModel, seconds: Sequence[float], copies: Sequence[CopyTime], arena: Arena) -> CostModel:
        graph = self.plan.graph
        times: dict[str, list[float]] = {}
        for taken, index in zip(seconds, self.plan.schedule.order, strict=True):
            if graph.ops[index].target not in TRANSFERS:
                times.setdefault(signature_of(graph, graph.ops[index]), []).append(taken)
        links = {}
        for direction, old in ((Direction.TO_HOST, base.to_host), (Direction.TO_DEVICE, base.to_device)):
            known = [(c.nbytes, c.seconds) for c in copies if c.direction is direction]
            if len({nbytes for nbytes, _ in known if nbytes}) < 2:
                known += probe(arena, direction)
            links[direction] = link_of(known) or old
        return replace(
            base,
            name=f"measured in training on {self._device.type}",
            measured={**base.measured, **{signature: max(median(found), 0.0) for signature, found in times.items()}},
            to_host=links[Direction.TO_HOST],
            to_device=links[Direction.TO_DEVICE],
        )

    def _begin(self) -> None:
        self._stalled = [t.copy.stalled for t in self._transfers]

    def _finish(self) -> None:
        at = self._marks.seconds()
        begun, ended = tuple(at[::2]), tuple(at[1::2])
        copies = []
        for t, before in zip(self._transfers, self._stalled, strict=True):
            stall = ended[t.waited] - begun[t.waited] if self._in_stream else t.copy.stalled - before
            copies.append((t.copy.nbytes, t.copy.seconds, stall))
        self._samples.append(_Sample(begun, ended, tuple(copies)))


def probe(arena: Arena, direction: Direction) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of copies between the arena, which must be free, and the host."""
    found = []
    arena.take()
    arena.copies.time(True)
    for nbytes in sorted({min(n, arena.nbytes) for n in PROBES}):
        found += [(nbytes, seconds) for seconds in _seconds_of_copies(arena, direction, nbytes)]
    unlock_unused(arena.device)
    return found


def _seconds_of_copies(arena: Arena, direction: Direction, nbytes: int) -> list[float]:
    """Return the seconds of some copies of so many bytes. The memory on the host is free when it returns."""
    host = Memory(nbytes, torch.device("cpu"), pinned=is_accelerator(arena.device))
    copy = arena.copies.copy(direction, host.memory)
    here = arena.memory[:nbytes]
    pair = (host.memory, here) if direction is Direction.TO_HOST else (here, host.memory)
    found = []
    for _ in range(_ROUNDS):
        copy.start(*pair)
        copy.wait()
        found.append(copy.seconds)
    arena.copies.drain()
    arena.copies.forget(host.memory)
    return found


class _HostMarks:
    """Points in time by the clock of the host."""

    def __init__(self, count: int) -> None:
        self._at = [0.0] * count

    def mark(self, index: int) -> Callable[[], None]:
        """Return a function that records point `index` when it is called."""
        at = self._at

        def note() -> None:
            at[index] = perf_counter()

        return note

    def seconds(self) -> list[float]:
        """Return the seconds of each point after the first one."""
        return [at - self._at[0] for at in self._at]


class _StreamMarks:
    """Points in time by events of the compute stream of a device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        self._events = [new_event(device, timed=True) for _ in range(count)]

    def mark(self, index: int) -> Callable[[], None]:
        """Return a function that records point `index` when it is called."""
        event = self._events[index]

        def note() -> None:
            record(event, self._device)

        return note

    def seconds(self) -> list[float]:
        """Return the seconds of each point after the first one, after waiting for the end of the step."""
        self._events[-1].synchronize()
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]


def _transfers(program: Program) -> Iterator[_TimedCopy]:
    """Yield the planned copies in the order of their starts, which is that of `program.copies`."""
    graph, order = program.plan.graph, program.plan.schedule.order
    base = bases(program.plan)
    waits: dict[tuple[int, int], list[int]] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        if op.target in TRANSFERS and op.target not in (OFFLOAD, RELOAD, SEND):
            waits.setdefault((op.reads[0], op.reads[1]), []).append(step)
    copies = iter(program.copies)
    count: dict[tuple[int, str], int] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        if op.target == SEND:
            next(copies)
        if op.target not in (OFFLOAD, RELOAD):
            continue
        out = op.target == OFFLOAD
        storage = base(graph.values[(op.reads if out else op.writes)[0]].storage)
        nth = count[storage, op.target] = count.get((storage, op.target), -1) + 1
        waited = next((w for w in waits.get((op.reads[0], op.writes[0]), ()) if w > step), len(order) - 1)
        direction = Direction.TO_HOST if out else Direction.TO_DEVICE
        yield _TimedCopy(storage, nth, direction, step, waited, next(copies))
