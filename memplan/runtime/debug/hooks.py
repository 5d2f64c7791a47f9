"""Hooks: functions of the user's that see what a step does while it does it, with no change in the model.

A program has two pairs of functions: the plain one, and one that tells of every event. The second is generated when
a hook is first set, over the same bound ops and the same addresses; as long as no hook is set the first one runs,
and nothing in it knows of hooks.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, SEND, SEND_WAIT
from memplan.core.graph import Graph
from memplan.core.lifetimes import host_problem
from memplan.core.plan import Plan
from memplan.core.problem import Buffer
from memplan.errors import MemplanError
from memplan.runtime.debug.sanitizers import Sanitizers


class EventKind(enum.StrEnum):
    """What happens; the value is the word for people."""

    OP = "op"
    RECOMPUTE = "recompute"  # an op that has run before in this step
    OFFLOAD = "offload"  # starts a copy to the host
    OFFLOAD_WAIT = "offload wait"
    RELOAD = "reload"  # starts a copy back
    RELOAD_WAIT = "reload wait"
    SEND = "send"  # starts a copy to another device
    SEND_WAIT = "send wait"
    EVICT = "evict"  # bytes are given up that are had again later; it has an end only


class When(enum.StrEnum):
    """Before it happens, or after."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBlock:
    """Bytes that a step holds: the name of the storage, "arena" or "host", and how many, alignment included; `device`
    is where they are by the plan.
    """

    storage: str
    memory: str
    nbytes: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One thing that a step does, at `step` of its plan (of `steps`).

    `op` is the name of the op, `target` its kernel, `module` and `source` where it came from, `phase` "forward" or
    "backward". `storage` is what a copy, a recompute or an eviction is about, by its name without a budget; "" for
    an op. `taken` are the blocks that the arena and the host hold from this step on (at a start), `given` those that
    they hold no more after it (at an end).
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


class Observed(Protocol):
    """What has hooks (a `Runner`)."""

    def observe(self, emit: Hook | None) -> None:
        """Tell `emit` of every event from now on; None: of nothing."""

    def require_observable(self) -> None:
        """Raise `UnsupportedCall` if no hook can see it."""


class Hooks:
    """The hooks of a compiled module or step, called in the order in which they were added.

    A hook is called with a `StepEvent` in the thread that runs the step, below autograd. It may veto: what it raises
    at a start comes before its op runs, ends the step there and reaches the caller unchanged. The arena is free for
    the next step, copies under way are waited for; what the step has already changed (parameters of a whole step,
    buffers, random numbers) stays changed. Single ops cannot be left out: the plan counts on each.
    """

    def __init__(self) -> None:
        self._hooks: tuple[Handle, ...] = ()
        self._observed: weakref.WeakSet[Observed] = weakref.WeakSet()

    def __len__(self) -> int:
        return len(self._hooks)

    def add(self, hook: Hook) -> Handle:
        """Call `hook` at every event from the next forward or backward on; the handle takes it away again.

        Raises `UnsupportedCall` for recorded CUDA graphs, which are replayed without Python.
        """
        if not callable(hook):
            raise MemplanError(f"{hook!r} cannot be called", where="hooks.add", hint="pass a function of one event")
        for observed in self._observed:
            observed.require_observable()
        handle = Handle(self, hook)
        self._set((*self._hooks, handle))
        return handle

    def remove(self, handle: Handle) -> None:
        """Take one hook away; with the last one, the plain functions run again. Removing it twice does nothing."""
        self._set(tuple(h for h in self._hooks if h is not handle))

    def attach(self, observed: Observed) -> None:
        """Let the hooks, now and later, see the steps of `observed`, which is not kept alive."""
        self._observed.add(observed)
        if self._hooks:
            observed.observe(self.emit)

    def emit(self, event: StepEvent) -> None:
        """Call every hook."""
        for handle in self._hooks:
            handle.hook(event)

    def _set(self, hooks: tuple[Handle, ...]) -> None:
        before, self._hooks = self._hooks, hooks
        if bool(before) is not bool(hooks):
            for observed in self._observed:
                observed.observe(self.emit if hooks else None)


class Handle:
    """One hook that was added: `remove()` takes it away, and so does leaving it as a context."""

    __slots__ = ("_hooks", "hook")

    def __init__(self, hooks: Hooks, hook: Hook) -> None:
        self._hooks = hooks
        self.hook = hook

    def remove(self) -> None:
        """Take the hook away."""
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
}


def events_of(plan: Plan) -> tuple[tuple[tuple[StepEvent, ...], tuple[StepEvent, ...]], ...]:
    """By step: the events before its op, and those after."""
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
    """`guards`, and around them the events of `plan`."""
    events = events_of(plan)
    return Sanitizers(
        tuple((*_calls(emit, before), *sanitizers.before(step)) for step, (before, _) in enumerate(events)),
        tuple((*sanitizers.after(step), *_calls(emit, after)) for step, (_, after) in enumerate(events)),
    )


def _calls(emit: Hook, events: Sequence[StepEvent]) -> list[Callable[[], None]]:
    def call(event: StepEvent) -> Callable[[], None]:
        def tell() -> None:
            emit(event)

        return tell

    return [call(event) for event in events]


def _blocks(plan: Plan) -> tuple[list[list[ArenaBlock]], list[list[ArenaBlock]]]:
    """By step: what is alive from it on, and what is not after it."""
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
    """Step -> the storages whose bytes are given up after it and had again later: the last touch of a life."""
    touches: dict[str, list[int]] = {}
    for step, index in enumerate(plan.schedule.order):
        for s in plan.graph.touched(plan.graph.ops[index]):
            if plan.graph.storages[s].planned:
                touches.setdefault(plan.graph.storages[s].name, []).append(step)
    found: dict[int, list[str]] = {}
    life: dict[str, str] = {}
    for e in plan.evictions:
        before = [s for s in touches.get(life.get(e.storage, e.storage), ()) if s < e.in_trigger]
        if before:  # else it was streamed, and comes for the first time
            found.setdefault(before[-1], []).append(e.storage)
        life[e.storage] = e.instance
    return found


def _subject(graph: Graph, index: int) -> int:
    """The storage of the arena that a copy, or a recompute, is about."""
    op = graph.ops[index]
    value = op.reads[0] if op.target in (OFFLOAD, OFFLOAD_WAIT, SEND, SEND_WAIT) else op.writes[0]
    return graph.values[value].storage


def _bases(plan: Plan) -> Callable[[int], str]:
    """The name of the storage that a storage is a life of."""
    base = {life: of for of, life in plan.eviction.instances} if plan.eviction else {}
    return lambda storage: plan.graph.storages[base.get(storage, storage)].name
