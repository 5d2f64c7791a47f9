"""Calls hooks (functions of the user) with the events of a running step, without a change in the model.

A program has two pairs of functions: a plain one, and one that reports every event. The second pair is generated when
the first hook is added, with the same bound ops and the same addresses. While there is no hook, the plain pair runs,
and hooks cost nothing. `Tracker` is a hook that counts the bytes in the arena and on the host.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from memplan.core.collectives import WAIT
from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, SEND, SEND_WAIT
from memplan.core.graph import Graph
from memplan.core.lifetimes import host_problem
from memplan.core.plan import Plan
from memplan.core.problem import Buffer
from memplan.errors import MemplanError
from memplan.runtime.debug.sanitizers import Sanitizers

if TYPE_CHECKING:
    from memplan.runtime.execute.runner import Runner


class EventKind(enum.StrEnum):
    """The kind of an event; the value is its name in output."""

    OP = "op"
    RECOMPUTE = "recompute"  # an op that has run before in this step
    OFFLOAD = "offload"  # starts a copy to the host
    OFFLOAD_WAIT = "offload wait"
    RELOAD = "reload"  # starts a copy back
    RELOAD_WAIT = "reload wait"
    SEND = "send"  # starts a copy to another device
    SEND_WAIT = "send wait"
    COLLECTIVE_WAIT = "collective wait"  # waits for a collective that an op has started
    EVICT = "evict"  # drops bytes that are restored later; it has an END only


class When(enum.StrEnum):
    """Whether an event is reported before or after its op."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBlock:
    """A block of bytes that a step holds.

    Attributes:
        storage: The name of the storage.
        memory: "arena" or "host".
        nbytes: Its bytes, alignment included.
        device: The device of the bytes in the plan.
    """

    storage: str
    memory: str
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """An event of a running step: an op, copy, recompute or eviction starts or ends.

    Attributes:
        kind: Its kind.
        when: Whether it starts or has ended.
        step: The step of the schedule, from 0.
        steps: The number of steps of the schedule.
        op: The name of the op.
        target: The kernel of the op.
        module: The path of the module that the op came from.
        source: The source line that the op came from.
        phase: "forward" or "backward".
        storage: The storage that is copied, recomputed or evicted, by its name in the plan without a budget; "" for
            an op.
        taken: At a start, the blocks that the arena and the host hold from this step on.
        given: At an end, the blocks that they no longer hold after this step.
    """

    kind: EventKind
    when: When
    step: int
    steps: int
    op: str
    target: str
    module: str
    source: str
    phase: str
    storage: str = ""
    taken: tuple[ArenaBlock, ...] = ()
    given: tuple[ArenaBlock, ...] = ()


Hook = Callable[[StepEvent], object]


class Hooks:
    """The hooks of a compiled module or step, called in the order in which they were added.

    A hook is called with a `StepEvent` in the thread that runs the step, below autograd. It may stop the step: an
    exception that it raises at the start of an op comes before the op runs, ends the step and reaches the caller
    unchanged. Running copies are waited for, and the arena is free for the next step. What the step has changed by then
    (parameters of a whole step, buffers, the state of random generators) stays changed. A hook cannot skip single ops.

    Example:
        ```python
        with compiled.hooks.add(lambda event: print(event.step, event.op)):
            compiled(inputs)
        ```
    """

    def __init__(self) -> None:
        self._hooks: tuple[Handle, ...] = ()
        self._observed: weakref.WeakSet[Runner] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, hook: Hook) -> Handle:
        """Call `hook` with every event from the next forward or backward on.

        Args:
            hook: A function of one `StepEvent`.

        Returns:
            A handle that removes the hook; it is also a context manager.

        Raises:
            UnsupportedCall: The step is recorded as a CUDA graph, which is replayed without Python.
            MemplanError: `hook` is not callable.
        """
        if not callable(hook):
            raise MemplanError(f"{hook!r} cannot be called", where="hooks.add", hint="pass a function of one event")
        for observed in self._observed:
            observed.require_observable()
        handle = Handle(self, hook)
        self._set((*self._hooks, handle))
        return handle

    def remove(self, handle: Handle) -> None:
        """Remove a hook. After the last one, the plain functions run again. Removing it twice does nothing."""
        self._set(tuple(h for h in self._hooks if h is not handle))

    def attach(self, observed: Runner) -> None:
        """Let current and later hooks observe the steps of `observed`, which is not kept alive."""
        self._observed.add(observed)
        if self._hooks:
            observed.observe(self.emit)

    def emit(self, event: StepEvent) -> None:
        """Call every hook with an event."""
        for handle in self._hooks:
            handle.hook(event)

    def _set(self, hooks: tuple[Handle, ...]) -> None:
        before, self._hooks = self._hooks, hooks
        if bool(before) is not bool(hooks):
            for observed in self._observed:
                observed.observe(self.emit if hooks else None)


class Handle:
    """A hook that was added. `remove()` removes it, and so does leaving the handle as a context manager."""

    __slots__ = ("_hooks", "hook")

    def __init__(self, hooks: Hooks, hook: Hook) -> None:
        self._hooks = hooks
        self.hook = hook

    def remove(self) -> None:
        """Remove the hook."""
        self._hooks.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


# -- the events of a plan --------------------------------------------------------------------------------

_KINDS = {
    OFFLOAD: EventKind.OFFLOAD,
    OFFLOAD_WAIT: EventKind.OFFLOAD_WAIT,
    RELOAD: EventKind.RELOAD,
    RELOAD_WAIT: EventKind.RELOAD_WAIT,
    SEND: EventKind.SEND,
    SEND_WAIT: EventKind.SEND_WAIT,
    WAIT: EventKind.COLLECTIVE_WAIT,
}


def events_of(plan: Plan) -> tuple[tuple[tuple[StepEvent, ...], tuple[StepEvent, ...]], ...]:
    """Return for each step the events before its op, and those after it."""
    graph, order = plan.graph, plan.schedule.order
    taken, given = _blocks(plan)
    evicted = _evicted(plan)
    bases = _bases(plan)
    ran: set[int] = set()
    found = []
    for step, index in enumerate(order):
        op = graph.ops[index]
        source = plan.eviction.sources[index] if plan.eviction else -1
        kind = _KINDS.get(op.target, EventKind.RECOMPUTE if source in ran else EventKind.OP)
        if source >= 0:
            ran.add(source)
        about = "" if kind is EventKind.OP else bases(_subject(graph, index))
        event = partial(
            StepEvent,
            step=step,
            steps=len(order),
            op=op.name,
            target=op.target,
            module=op.origin.module,
            source=op.origin.source,
            phase=op.phase.value,
        )
        start = event(kind=kind, when=When.START, storage=about, taken=tuple(taken[step]))
        end = event(kind=kind, when=When.END, storage=about, given=tuple(given[step]))
        gone = (event(kind=EventKind.EVICT, when=When.END, storage=name) for name in evicted.get(step, ()))
        found.append(((start,), (end, *gone)))
    return tuple(found)


def observing(sanitizers: Sanitizers, plan: Plan, emit: Hook) -> Sanitizers:
    """Return sanitizers with the events of `plan` around them."""
    events = events_of(plan)
    return Sanitizers(
        tuple((*_calls(emit, before), *sanitizers.before(step)) for step, (before, _) in enumerate(events)),
        tuple((*sanitizers.after(step), *_calls(emit, after)) for step, (_, after) in enumerate(events)),
    )


def _calls(emit: Hook, events: Sequence[StepEvent]) -> list[Callable[[], object]]:
    return [partial(emit, event) for event in events]


def _blocks(plan: Plan) -> tuple[list[list[ArenaBlock]], list[list[ArenaBlock]]]:
    """Return for each step the blocks that are alive from it on, and those that are not alive after it."""
    steps = len(plan.schedule.order)
    taken: list[list[ArenaBlock]] = [[] for _ in range(steps)]
    given: list[list[ArenaBlock]] = [[] for _ in range(steps)]

    device_of = {s.name: s.device for s in plan.graph.storages}

    def add(buffers: Sequence[Buffer], memory: str) -> None:
        for b in buffers:
            block = ArenaBlock(storage=b.id, memory=memory, nbytes=b.size, device=device_of[b.id])
            taken[b.live.start].append(block)
            given[b.live.end - 1].append(block)

    add(plan.problem.buffers, "arena")
    if plan.eviction is not None:
        add(host_problem(plan.graph, plan.schedule, alignment=plan.alignment).buffers, "host")
    return taken, given


def _evicted(plan: Plan) -> dict[int, list[str]]:
    """Return by step the storages whose bytes are dropped after it and restored later."""
    touches: dict[str, list[int]] = {}
    for step, index in enumerate(plan.schedule.order):
        for s in plan.graph.touched(plan.graph.ops[index]):
            if plan.graph.storages[s].planned:
                touches.setdefault(plan.graph.storages[s].name, []).append(step)
    found: dict[int, list[str]] = {}
    instance: dict[str, str] = {}
    for e in plan.evictions:
        before = [s for s in touches.get(instance.get(e.storage, e.storage), ()) if s < e.in_trigger]
        if before:  # otherwise it is host-resident, and is loaded for the first time
            found.setdefault(before[-1], []).append(e.storage)
        instance[e.storage] = e.instance
    return found


def _subject(graph: Graph, index: int) -> int:
    """Return the storage of the arena that an op copies or recomputes."""
    op = graph.ops[index]
    value = op.reads[0] if op.target in (OFFLOAD, OFFLOAD_WAIT, SEND, SEND_WAIT) else op.writes[0]
    return graph.values[value].storage


def _bases(plan: Plan) -> Callable[[int], str]:
    """Return a function from a storage to the name of the traced storage that it is an instance of."""
    base = {instance: of for of, instance in plan.eviction.instances} if plan.eviction else {}
    return lambda storage: plan.graph.storages[base.get(storage, storage)].name


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """The contents of one memory: its bytes (alignment included), and the names of its storages, the oldest first."""

    nbytes: int = 0
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """The bytes that were held while the op of `step` (a step of the schedule) ran.

    `devices` divides the contents of the arena by device, by its name in the plan.
    """

    step: int
    op: str
    arena: HeldBytes
    host: HeldBytes
    devices: Mapping[str, HeldBytes]


class Tracker:
    """A hook that counts the bytes in the arena and on the host while a step runs.

    Use one tracker for each compiled module or step. Bytes outside the arena (parameters, inputs, outputs, gradients
    that the caller keeps) are not counted. A step that ends early has no entries for ops that did not run.

    Attributes:
        steps: An entry for each op of the last training step, or of the current one so far. Each call of the model
            clears it.

    Example:
        ```python
        tracker = memplan.Tracker()
        with compiled.hooks.add(tracker):
            compiled(inputs).sum().backward()
        print(tracker.peak)  # bytes
        ```
    """

    def __init__(self) -> None:
        self.steps: list[Tracked] = []
        self._held: dict[str, dict[str, ArenaBlock]] = {"arena": {}, "host": {}}

    def __call__(self, event: StepEvent) -> None:
        """Count one event."""
        if event.kind is EventKind.EVICT:  # the END of its op has named the blocks already
            return
        if event.when is When.START:
            self._start(event)
        else:
            for block in event.given:
                del self._held[block.memory][block.storage]

    @property
    def now(self) -> Tracked | None:
        """The latest entry of `steps`; None if there is none."""
        return self.steps[-1] if self.steps else None

    @property
    def peak(self) -> int:
        """The most bytes of the arena that were held at once. After a whole step it is the plan's `max_live`."""
        return max((t.arena.nbytes for t in self.steps), default=0)

    def peak_of(self, device: str) -> int:
        """Return the most bytes of the arena that were held at once on one device.

        Args:
            device: The name of the device in the plan.

        Returns:
            Bytes; 0 for a device that has no arena.

        Example:
            ```python
            print(tracker.peak_of("cuda:0"))
            ```
        """
        return max((t.devices[device].nbytes for t in self.steps if device in t.devices), default=0)

    @property
    def host_peak(self) -> int:
        """The most bytes of host memory that were held at once."""
        return max((t.host.nbytes for t in self.steps), default=0)

    def _start(self, event: StepEvent) -> None:
        if event.step == 0:
            self.steps.clear()
            self._held = {"arena": {}, "host": {}}
        for block in event.taken:
            self._held[block.memory][block.storage] = block
        arena, host = (_held(self._held[memory]) for memory in ("arena", "host"))
        by_device: dict[str, dict[str, ArenaBlock]] = {}
        for name, block in self._held["arena"].items():
            by_device.setdefault(block.device, {})[name] = block
        devices = MappingProxyType({device: _held(blocks) for device, blocks in by_device.items()})
        self.steps.append(Tracked(step=event.step, op=event.op, arena=arena, host=host, devices=devices))


def _held(blocks: dict[str, ArenaBlock]) -> HeldBytes:
    return HeldBytes(nbytes=sum(b.nbytes for b in blocks.values()), tensors=tuple(blocks))
