"""One arena for programs that run in turns: the graphs that dynamo cuts a model into.

While nothing is known, each lane (a program that one call can have in flight) has an arena of its own. A complete
step tells in which order forwards and backwards follow; with that, all buffers of all lanes are one problem, and
its solution one arena: what a graph gives up, the next one uses. A call that comes in another order is noticed:
it gets a lane of its own, or the activations that it overwrites are given up, and their backward raises.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight
from memplan.solvers import solve

_MAX_LAYOUTS = 8  # of one lane: a program whose order never repeats is left alone
_MAX_EVENTS = 1024  # of one step


class GraphInstance(Protocol):
    """What can be laid out with others. `plan` is that of a lane alone; `role` is its place among others."""

    plan: Plan
    role: ArenaSlot | None
    layouts: int

    ownership: ObservedOwnership

    @property
    def device(self) -> torch.device: ...

    def move(self, plan: Plan, arena: Arena) -> None:
        """Run from now on at the offsets of `plan` in `arena`; nothing is in flight."""


@dataclass(frozen=True, eq=False, slots=True)
class InstanceEvent:
    """A forward (or backward) of a lane, and which other lanes waited for their backward meanwhile."""

    lane: GraphInstance
    backward: bool
    waiting: frozenset[int]


@dataclass(frozen=True, eq=False, slots=True)
class ArenaSlot:
    """A lane's place in a layout: the lanes in flight (by id) that its forward, its backward leave alone."""

    timeline: tuple[tuple[int, bool], ...]
    members: tuple[weakref.ref[Any], ...]
    leaves_alone: tuple[frozenset[int], frozenset[int]]

    def disturbed(self, lane: GraphInstance, *, backward: bool) -> list[GraphInstance]:
        """Lanes in flight whose activations this forward or backward of `lane` would overwrite."""
        others = [member() for member in self.members]
        return [
            other
            for other in others
            if other is not None
            and other is not lane
            and other.ownership.pending is not None
            and other.role is not None
            and other.role.timeline is self.timeline  # it has not moved to another arena since
            and id(other) not in self.leaves_alone[backward]
        ]


class ObservedOwnership(ArenaOwnership):
    """A ledger whose steps are noted. `lane` is set by the lane itself."""

    def __init__(self, conductor: ArenaCoordinator, lane: GraphInstance) -> None:
        super().__init__(_nothing, _nothing)
        self._conductor = conductor
        self._lane = weakref.ref(lane)

    def begin(self, *, keep: bool) -> InFlight:
        """As `ArenaOwnership.begin`."""
        step = super().begin(keep=keep)
        self._note(backward=False)
        return step

    def end(self, step: InFlight) -> None:
        """As `ArenaOwnership.end`; gives up the activations of other lanes that this backward overwrites."""
        super().end(step)
        self._note(backward=True)

    def join(self, whole: ArenaOwnership) -> None:
        """Drain and take turns as the whole arena does: all its parts are on the same memory."""
        self.drain, self.turn = whole.drain, whole.turn

    def give_up(self) -> None:
        """The activations of the step in flight are overwritten: its backward will raise."""
        self._current = lambda: None

    def _note(self, *, backward: bool) -> None:
        lane = self._lane()
        if lane is not None:
            self._conductor.note(lane, backward=backward)


class ArenaCoordinator:
    """Notes in which order lanes run, and lays them out together when a step is complete."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[InstanceEvent] = []
        self._given_up = False

    def note(self, lane: GraphInstance, *, backward: bool) -> None:
        """A forward or backward of `lane` begins."""
        if lane.role is not None:
            for other in lane.role.disturbed(lane, backward=backward):
                other.ownership.give_up()
        with self._lock:
            if len(self._events) >= _MAX_EVENTS:  # some graph is kept for ever, and no step is ever complete
                self._given_up, self._events = True, []
            if self._given_up:
                return
            waiting = {id(e.lane) for e in self._events if e.lane is not lane and e.lane.ownership.pending is not None}
            self._events.append(InstanceEvent(lane, backward, frozenset(waiting)))

    def settle(self) -> None:
        """Between two steps, when nothing is in flight: lay out what the last one ran, unless it is already."""
        with self._lock:
            events = self._events
            if not events or any(e.lane.ownership.pending is not None for e in events):
                return
            self._events = []
        events = _completed(events)
        timeline = tuple((id(e.lane), e.backward) for e in events)
        role = events[0].lane.role
        if role is not None and role.timeline == timeline:
            return
        lanes = list({id(e.lane): e.lane for e in events}.values())
        repeated = len(set(timeline)) < len(timeline)  # one lane twice: the order is not that of one step
        if len(lanes) > 1 and not repeated and all(lane.layouts < _MAX_LAYOUTS for lane in lanes):
            _lay_out(lanes, events, timeline)


def _completed(events: list[InstanceEvent]) -> list[InstanceEvent]:
    """With the backwards that did not come (a loss that was infinite, say, or only looked at), in the order in which a
    later step would run them."""
    came = {id(e.lane) for e in events if e.backward}
    missing = list(dict.fromkeys(e.lane for e in events if id(e.lane) not in came and _has_backward(e.lane)))
    added = [
        InstanceEvent(lane, True, frozenset(id(earlier) for earlier in missing[:i]))
        for i, lane in reversed(list(enumerate(missing)))
    ]
    return events + added


def _has_backward(lane: GraphInstance) -> bool:
    return len(lane.plan.graph.ops) > lane.plan.graph.forward_ops


def _lay_out(
    lanes: Sequence[GraphInstance], events: Sequence[InstanceEvent], timeline: tuple[tuple[int, bool], ...]
) -> None:
    """Place all buffers of all lanes in one arena, and move the lanes there."""
    starts, end = {}, 0
    for event in events:
        starts[id(event.lane), event.backward] = end
        forward = event.lane.plan.graph.forward_ops
        end += len(event.lane.plan.graph.ops) - forward if event.backward else forward
    buffers = [b for i, lane in enumerate(lanes) for b in _shifted(lane, i, starts)]
    solution = solve(Problem(buffers=tuple(buffers)))
    arena = Arena(solution.arena_size, lanes[0].device)
    members = tuple(weakref.ref(lane) for lane in lanes)
    waiting = {(id(e.lane), e.backward): e.waiting for e in events}
    for i, lane in enumerate(lanes):
        offsets = {b.id: solution.offsets[_name(i, b)] for b in lane.plan.problem.buffers}
        placed = replace(lane.plan.solution, offsets=offsets, arena_size=solution.arena_size)
        lane.move(replace(lane.plan, solution=placed), part_of(arena, lane.ownership))
        alone = tuple(waiting.get((id(lane), backward), frozenset()) for backward in (False, True))
        lane.role = ArenaSlot(timeline, members, (alone[0], alone[1]))
        lane.layouts += 1


def _shifted(lane: GraphInstance, number: int, starts: dict[tuple[int, bool], int]) -> list[Buffer]:
    """The buffers of a lane on the time axis of the whole step."""
    split = lane.plan.graph.forward_ops
    forward, backward = starts[id(lane), False], starts.get((id(lane), True), 0)  # without one, nothing lives there

    def at(step: int) -> int:
        return forward + step if step < split else backward + step - split

    def until(step: int) -> int:
        return forward + step if step <= split else backward + step - split

    moved = [(b, Interval(at(b.live.start), until(b.live.end))) for b in lane.plan.problem.buffers]
    return [replace(b, id=_name(number, b), live=live, gaps=()) for b, live in moved if not live.is_empty]


def part_of(arena: Arena, ownership: ObservedOwnership) -> Arena:
    """The same memory with a ledger of its own."""
    ownership.join(arena.ownership)
    part = copy.copy(arena)
    part.ownership = ownership
    part.whole = arena  # type: ignore[attr-defined]  # which must live as long
    return part


def _nothing() -> None:
    """Until the ledger is that of a part of an arena."""


def _name(number: int, buffer: Buffer) -> str:
    return f"{number}.{buffer.id}"
