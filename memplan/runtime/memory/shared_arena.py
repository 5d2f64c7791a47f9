"""Places the programs of several graphs in one arena: the graphs into which dynamo divides a model.

At first, each graph instance (a program that can have one call in flight) has an arena of its own. A complete step
shows the order of forwards and backwards. With that order, the buffers of all instances are one problem, and its
solution is one arena: bytes that one graph releases are used by the next. If a later call comes in another order, it
gets another instance, or the activations that it overwrites are dropped, and their backward raises.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight
from memplan.solvers import solve

_MAX_LAYOUTS = 8  # of one instance: a program whose order never repeats keeps its last layout
_MAX_EVENTS = 1024  # in one step


PrepareStep = Callable[[Sequence[Any], Sequence[tuple[int, bool]]], None]


class ArenaUser(Protocol):
    """A program that can share an arena. `plan` is its plan alone; `slot` is its place in the shared arena."""

    plan: Plan
    slot: ArenaSlot | None
    layouts: int

    ownership: ObservedOwnership

    @property
    def device(self) -> torch.device: ...

    def move(self, plan: Plan, arena: Arena) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while nothing is in flight."""


@dataclass(frozen=True, eq=False, slots=True)
class InstanceEvent:
    """A forward (or backward) of an instance, and the other instances (by id) that were in flight then."""

    instance: ArenaUser
    backward: bool
    in_flight: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class ArenaSlot:
    """The place of an instance in a shared arena.

    `leaves_alone`: the instances (by id) whose activations its forward, and its backward, do not overwrite. `number`
    counts the layouts of a coordinator.
    """

    timeline: tuple[tuple[int, bool], ...]
    members: tuple[weakref.ref[Any], ...]
    leaves_alone: tuple[frozenset[int], frozenset[int]]
    number: int

    def overwritten_by(self, instance: ArenaUser, *, backward: bool) -> list[ArenaUser]:
        """Return the instances in flight whose activations a forward or backward of `instance` would overwrite."""
        others = [member() for member in self.members]
        return [
            other
            for other in others
            if other is not None
            and other is not instance
            and other.ownership.pending is not None
            and other.slot is not None
            and other.slot.timeline is self.timeline  # it has not moved to another arena since
            and id(other) not in self.leaves_alone[backward]
        ]


class ObservedOwnership(ArenaOwnership):
    """An `ArenaOwnership` that reports each forward and backward of its instance to a coordinator."""

    def __init__(self, coordinator: ArenaCoordinator, instance: ArenaUser) -> None:
        super().__init__(_nothing, _nothing)
        self._coordinator = coordinator
        self._instance = weakref.ref(instance)

    def begin(self, *, keep: bool) -> InFlight:
        """Start a step as `ArenaOwnership.begin` does, and report its forward."""
        step = super().begin(keep=keep)
        self._report(backward=False)
        return step

    def end(self, step: InFlight) -> None:
        """Start a backward as `ArenaOwnership.end` does, and report it: activations that it overwrites are dropped."""
        super().end(step)
        self._report(backward=True)

    def share_with(self, whole: ArenaOwnership) -> None:
        """Drain copies and order streams as the whole arena does, which all its parts share."""
        self.drain, self.order_streams = whole.drain, whole.order_streams

    def drop_activations(self) -> None:
        """Drop the activations of the step in flight, which are overwritten: its backward will raise."""
        self._current = lambda: None

    def _report(self, *, backward: bool) -> None:
        instance = self._instance()
        if instance is not None:
            self._coordinator.record_event(instance, backward=backward)


class ArenaCoordinator:
    """Records the order in which instances run, and places them in one arena when a step is complete.

    `prepare` is called with the instances and the timeline before they are placed; it may replace their plans.
    """

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._events: list[InstanceEvent] = []
        self._given_up = False
        self._layouts = 0

    def record_event(self, instance: ArenaUser, *, backward: bool) -> None:
        """Record that a forward or backward of `instance` begins."""
        if instance.slot is not None:
            for other in instance.slot.overwritten_by(instance, backward=backward):
                other.ownership.drop_activations()
        with self._lock:
            if len(self._events) >= _MAX_EVENTS:  # one graph stays in flight for ever, so that no step is ever complete
                self._given_up, self._events = True, []
            if self._given_up:
                return
            in_flight = {
                id(e.instance)
                for e in self._events
                if e.instance is not instance and e.instance.ownership.pending is not None
            }
            self._events.append(InstanceEvent(instance, backward, frozenset(in_flight)))

    def place_last_step(self) -> None:
        """Place the instances of the last step in one arena, if nothing is in flight and they are not there already."""
        with self._lock:
            events = self._events
            if not events or any(e.instance.ownership.pending is not None for e in events):
                return
            self._events = []
        events = _completed(events)
        timeline = tuple((id(e.instance), e.backward) for e in events)
        slot = events[0].instance.slot
        if slot is not None and slot.timeline == timeline:
            return
        instances = list({id(e.instance): e.instance for e in events}.values())
        repeated = len(set(timeline)) < len(timeline)  # an instance ran twice: this is not the order of one step
        if len(instances) > 1 and not repeated and all(instance.layouts < _MAX_LAYOUTS for instance in instances):
            if self._prepare is not None:
                position = {id(instance): i for i, instance in enumerate(instances)}
                self._prepare(instances, [(position[number], backward) for number, backward in timeline])
            self._layouts += 1
            _lay_out(instances, events, timeline, self._layouts)


def _completed(events: list[InstanceEvent]) -> list[InstanceEvent]:
    """Append the backwards that were skipped (of an infinite loss, say), in the order in which they would run."""
    came = {id(e.instance) for e in events if e.backward}
    missing = list(
        dict.fromkeys(e.instance for e in events if id(e.instance) not in came and _has_backward(e.instance))
    )
    added = [
        InstanceEvent(instance, True, frozenset(id(earlier) for earlier in missing[:i]))
        for i, instance in reversed(list(enumerate(missing)))
    ]
    return events + added


def _has_backward(instance: ArenaUser) -> bool:
    return len(instance.plan.graph.ops) > instance.plan.graph.forward_ops


def _lay_out(
    instances: Sequence[ArenaUser],
    events: Sequence[InstanceEvent],
    timeline: tuple[tuple[int, bool], ...],
    number: int,
) -> None:
    """Place all buffers of all instances in one arena, and move the instances there."""
    starts, end = {}, 0
    for event in events:
        starts[id(event.instance), event.backward] = end
        forward = event.instance.plan.graph.forward_ops
        end += len(event.instance.plan.graph.ops) - forward if event.backward else forward
    buffers = [b for i, instance in enumerate(instances) for b in _shifted(instance, i, starts)]
    solution = solve(Problem(buffers=tuple(buffers)))
    arena = Arena(solution.arena_size, instances[0].device)
    members = tuple(weakref.ref(instance) for instance in instances)
    in_flight = {(id(e.instance), e.backward): e.in_flight for e in events}
    for i, instance in enumerate(instances):
        offsets = {b.id: solution.offsets[_name(i, b)] for b in instance.plan.problem.buffers}
        placed = replace(instance.plan.solution, offsets=offsets, arena_size=solution.arena_size)
        instance.move(replace(instance.plan, solution=placed), part_of(arena, instance.ownership))
        alone = tuple(in_flight.get((id(instance), backward), frozenset()) for backward in (False, True))
        instance.slot = ArenaSlot(timeline, members, (alone[0], alone[1]), number)
        instance.layouts += 1


def _shifted(instance: ArenaUser, number: int, starts: dict[tuple[int, bool], int]) -> list[Buffer]:
    """Return the buffers of an instance, with live intervals in steps of the whole training step."""
    split = instance.plan.graph.forward_ops
    forward, backward = (
        starts[id(instance), False],
        starts.get((id(instance), True), 0),
    )  # without a backward, nothing is alive there

    def at(step: int) -> int:
        return forward + step if step < split else backward + step - split

    def until(step: int) -> int:
        return forward + step if step <= split else backward + step - split

    moved = [(b, Interval(at(b.live.start), until(b.live.end))) for b in instance.plan.problem.buffers]
    return [replace(b, id=_name(number, b), live=live, gaps=()) for b, live in moved if not live.is_empty]


def part_of(arena: Arena, ownership: ObservedOwnership) -> Arena:
    """Return the same memory with an ownership of its own."""
    ownership.share_with(arena.ownership)
    part = copy.copy(arena)
    part.ownership = ownership
    part.whole = arena  # type: ignore[attr-defined]  # keeps the whole arena alive
    return part


def _nothing() -> None:
    """Does nothing: it stands in until the ownership joins an arena."""


def _name(number: int, buffer: Buffer) -> str:
    return f"{number}.{buffer.id}"
