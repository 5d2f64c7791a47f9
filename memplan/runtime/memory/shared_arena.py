"""Places programs in one arena, of which several calls may wait for their backward.

They are the graphs into which dynamo divides a model, and the calls of one compiled module that are in flight together.
At first, each instance (a program that can have one call in flight) has an arena of its own. A complete step shows the
order of forwards and backwards. With that order, the buffers of all its instances are one problem, and its solution is
a place for each in the shared arena: bytes that one releases are used by the next. The shared arena grows while nothing
is in flight, and steps of other orders share its bytes.

If a later call comes in another order, its instance moves out, or another one is made. If backwards come in another
order, activations that one would overwrite are copied first, and copied back for their own backward.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.errors import InputMismatch, MemplanError
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaOwnership, clear_gradients
from memplan.solvers import solve

if TYPE_CHECKING:
    from memplan.runtime.execute.gradients import ArenaGradients
    from memplan.runtime.execute.instances import ProgramInstance

_MAX_LAYOUTS = 8  # of one instance: one whose order never repeats keeps its last layout, or an arena of its own
_MAX_EVENTS = 1024  # in one step
PrepareStep = Callable[[Sequence[Any], Sequence[tuple[int, bool]]], None]


class PassedTensors:
    """The tensors that graphs or models have returned, by their storages, as long as these are alive."""

    def __init__(self) -> None:
        self._returned: dict[int, tuple[StorageWeakRef, Hashable]] = {}

    def taken(self, inputs: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
        """Return a key of each input: that of the result that it is, or of its own storage."""
        found: list[Hashable] = []
        for x in inputs:
            address = x.untyped_storage()._cdata
            ref, key = self._returned.get(address, (None, None))
            found.append(("input", address) if ref is None or ref.expired() else key)  # type: ignore[no-untyped-call]
        return tuple(found)

    def returned(self, results: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
        """Return a key of each result, by which later inputs are recognised: that of an earlier call if it has one."""
        alive = {a: entry for a, entry in self._returned.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        keys: list[Hashable] = []
        for storage in (result.untyped_storage() for result in results):
            new = StorageWeakRef(storage), object()  # type: ignore[no-untyped-call]
            keys.append(alive.setdefault(storage._cdata, new)[1])
        self._returned = alive
        return tuple(keys)


@dataclass(frozen=True, eq=False, slots=True)
class StepLayout:
    """The places of the instances of one step. `number` counts the layouts of a coordinator.

    `timeline`: the first forward and backward of each instance (by its position in `members`), in order.
    """

    number: int
    members: tuple[weakref.ref[Any], ...]
    timeline: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, eq=False, slots=True)
class ArenaSlot:
    """The place of an instance in the shared arena, in the layout of one order.

    `leaves_alone`: the instances (by id) whose activations its forward, and its backward, do not overwrite, if they are
    in the same layout.
    """

    layout: StepLayout
    leaves_alone: tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True, eq=False, slots=True)
class InstanceEvent:
    """A forward (or backward) of an instance, and the other instances (by id) that were in flight then."""

    instance: ProgramInstance
    backward: bool
    in_flight: frozenset[int]


class ArenaCoordinator:
    """Records the order in which instances run, and places them in one arena when a step is complete.

    `running` is held while a step of any instance runs, and while instances move. `calling` is held by a call from when
    it chooses an instance until that has run. `prepare` is called with the instances and the timeline of a step before
    they are placed together; it may replace their plans.

    `left` are the gradients that the last backward has left in the arena: they move out before anything else uses its
    bytes. That is right for steps of one instance with a backward alone: `gradients_in_arena` is False from the first
    step with several on.
    """

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self._prepare = prepare
        self._layouts = 0
        self.passed = PassedTensors()
        self.members: weakref.WeakSet[ProgramInstance] = weakref.WeakSet()  # the instances that have run
        self.running = threading.Lock()
        self.calling = threading.RLock()
        self._lock = threading.Lock()
        self._events: list[InstanceEvent] = []
        self._waiting: list[ProgramInstance] = []
        self._given_up = False
        self._conflicts = False
        self._shared: weakref.ref[Arena] | None = None
        self.left: list[ArenaGradients] = []
        self.gradients_in_arena = True

    def arena_of_its_own(self, nbytes: int, device: torch.device) -> Arena:
        """Return a new arena for an instance that is about to be made or moved."""
        return Arena(nbytes, device).part(ArenaOwnership(_nothing, _nothing, self))

    @property
    def shared(self) -> Arena | None:
        """The arena that instances share; None until the first step is complete."""
        return None if self._shared is None else self._shared()

    @property
    def waiting(self) -> list[ProgramInstance]:
        """The instances that wait for their backward, in the order of their forwards."""
        self._waiting = [user for user in self._waiting if user.ownership.pending is not None]
        return self._waiting

    def overwritten_by(self, instance: ProgramInstance, *, backward: bool) -> list[ProgramInstance]:
        """Return the instances in flight whose activations a forward or backward of `instance` would overwrite."""
        slot = instance.slot
        if slot is None:
            return []
        alone = slot.leaves_alone[backward]
        others = ((other, other.slot) for other in self.waiting if other is not instance)
        return [
            other
            for other, its in others
            if its is not None
            and not other.ownership.is_aside
            and (its.layout is not slot.layout or id(other) not in alone)
        ]

    def is_idle(self, instance: ProgramInstance) -> bool:
        """Return whether an instance can run: not in flight itself, and without overwriting activations that are."""
        return instance.ownership.pending is None and not self.overwritten_by(instance, backward=False)

    def record_event(self, instance: ProgramInstance, *, backward: bool) -> None:
        """Record that a forward or backward of `instance` begins; what it would overwrite is set aside."""
        for other in self.overwritten_by(instance, backward=backward):
            other.ownership.set_aside(other)
            self._conflicts = True
        with self._lock:
            self.members.add(instance)
            if not backward and instance.ownership.pending is not None:
                self._waiting = [user for user in self._waiting if user is not instance] + [instance]
            if len(self._events) >= _MAX_EVENTS:  # one graph stays in flight for ever, so that no step is ever complete
                self._given_up, self._events = True, []
            if self._given_up:
                return
            in_flight = {id(user) for user in self.waiting if user is not instance}
            self._events.append(InstanceEvent(instance, backward, frozenset(in_flight)))

    def place_last_step(self) -> None:
        """Place the instances of the last step in the shared arena, if nothing is in flight and it helps."""
        if (not self._events and not self._given_up) or self.left or not self.running.acquire(blocking=False):
            return  # another thread runs a step, or gradients of the last one are in the arena
        try:
            with self._lock:
                if self.waiting:
                    return
                events, self._events, self._given_up = self._events, [], False
                conflicts, self._conflicts = self._conflicts, False
            instances = list({id(e.instance): e.instance for e in events}.values())
            homeless = any(one.slot is None and one.layouts < _MAX_LAYOUTS for one in instances)
            again = conflicts and all(instance.layouts < _MAX_LAYOUTS for instance in instances)
            if (homeless or again) and len({instance.arena.device for instance in instances}) == 1:
                with torch.inference_mode(False):
                    self._lay_out(instances, completed_events(events))
        finally:
            self.running.release()

    def settle(self, instance: ProgramInstance) -> None:
        """Have room for an instance in its arena, which may have been emptied; elsewhere while calls are in flight."""
        plan = instance.runner.plan
        if instance.arena.fits(plan):
            return
        if self.waiting:
            self.take_out(instance)
        else:
            instance.ownership.clear_left()
            instance.arena.fit(plan)

    def take_out(self, instance: ProgramInstance) -> None:
        """Move an instance that is not in flight to an arena of its own, as calls in flight hold bytes of its place."""
        instance.move(instance.plan, Arena(instance.plan.arena_size, instance.arena.device))
        instance.slot = None

    def _lay_out(self, instances: Sequence[ProgramInstance], events: Sequence[InstanceEvent]) -> None:
        """Place all buffers of all instances in the shared arena, and move the instances there."""
        alone = len(instances) == 1
        position = {id(instance): i for i, instance in enumerate(instances)}
        timeline = tuple(dict.fromkeys((position[id(e.instance)], e.backward) for e in events))
        self._layouts += 1
        layout = StepLayout(self._layouts, tuple(map(weakref.ref, instances)), timeline)
        if alone and self.shared is None:  # its own arena becomes the shared one
            self._shared = weakref.ref(instances[0].arena.whole)
            instances[0].slot = ArenaSlot(layout, (frozenset(), frozenset()))
            return
        if self._prepare is not None and not alone:
            self._prepare(instances, timeline)
        plans = [instances[0].plan] if alone else joint_plans(instances, events)
        shared = self._make_room(plans[0].arena_size, instances)
        in_flight: dict[tuple[int, bool], frozenset[int]] = {}
        for e in events:
            key = id(e.instance), e.backward
            in_flight[key] = in_flight.get(key, frozenset()) | e.in_flight
        for instance, plan in zip(instances, plans, strict=True):
            if not _move(instance, plan, shared):
                continue
            none: frozenset[int] = frozenset()
            left = (in_flight.get((id(instance), False), none), in_flight.get((id(instance), True), none))
            instance.slot = ArenaSlot(layout, left)
            instance.layouts += 1

    def _make_room(self, nbytes: int, instances: Sequence[ProgramInstance]) -> Arena:
        """Return the shared arena, with at least `nbytes` bytes; arenas that are left or replaced are freed first."""
        shared = self.shared
        for instance in instances:
            if shared is None or not instance.arena.shares_memory(shared):
                instance.arena.give_back()
        if shared is None:
            shared = Arena(nbytes, instances[0].arena.device)
            self._shared = weakref.ref(shared)
        elif shared.nbytes < nbytes:
            shared.memories[0].resize(nbytes)
        return shared


def release_arenas(instances: Iterable[ProgramInstance]) -> bool:
    """Free the arenas of instances of any coordinators; the they take other bytes when they run again.

    Returns False, and frees nothing, if a call waits for its backward, another thread runs one, or a gradient of the
    last step cannot be moved out of the arena.
    """
    of: dict[ArenaCoordinator, list[ProgramInstance]] = {}
    for instance in instances:
        coordinator = instance.ownership.coordinator
        assert coordinator is not None
        of.setdefault(coordinator, []).append(instance)
    with contextlib.ExitStack() as held:
        for coordinator in of:
            for lock in (coordinator.calling, coordinator.running):
                if not lock.acquire(blocking=False):
                    return False
                held.callback(lock.release)
            if coordinator.waiting:
                return False
            try:
                clear_gradients(coordinator.left)
            except MemplanError:
                return False
        for instance in (one for members in of.values() for one in members):
            instance.ownership.drain()
            instance.arena.give_back()
    return True


def _move(instance: ProgramInstance, plan: Plan, arena: Arena) -> bool:
    """Move an instance, unless the model is no longer what it was traced for: the call that selects it will say so."""
    try:
        instance.move(plan, arena)
    except InputMismatch:
        instance.slot = None
        return False
    return True


def _nothing() -> None:
    """Does nothing: it stands in until the ownership joins an arena."""


# -- places ----------------------------------------------------------------------------------------------


def completed_events(events: Sequence[InstanceEvent]) -> list[InstanceEvent]:
    """Return the events with the backwards that did not come, of an infinite loss or because results were dropped.

    Each is put after the last event at which its instance was in flight, those of one event in the reverse order of
    their forwards. A later step in which it comes at another time is of another order.
    """
    ends_with_backward = {id(e.instance): e.backward for e in events}
    came = {one for one, backward in ends_with_backward.items() if backward}
    missing = dict.fromkeys(e.instance for e in events if id(e.instance) not in came and _has_backward(e.instance))
    last = {one: max(i for i, e in enumerate(events) if e.instance is one or id(one) in e.in_flight) for one in missing}
    found: list[InstanceEvent] = []
    for i, event in enumerate(events):
        found.append(event)
        waiting = event.in_flight if event.backward else event.in_flight | {id(event.instance)}
        for one in reversed([one for one in missing if last[one] == i]):
            waiting -= {id(one)}
            found.append(InstanceEvent(one, True, waiting))
    return found


def _has_backward(instance: ProgramInstance) -> bool:
    return len(instance.plan.graph.ops) > instance.plan.graph.forward_ops


def joint_plans(instances: Sequence[ProgramInstance], events: Sequence[InstanceEvent]) -> list[Plan]:
    """Return a plan for each instance, with offsets at which all of them can be in flight as in these events.

    The buffers of an instance that ran several times are alive from the first time to the last.
    """
    first: dict[tuple[int, bool], int] = {}
    last: dict[tuple[int, bool], int] = {}
    end = 0
    for event in events:
        key = id(event.instance), event.backward
        first.setdefault(key, end)
        last[key] = end
        forward = event.instance.plan.graph.forward_ops
        end += len(event.instance.plan.graph.ops) - forward if event.backward else forward
    buffers = [b for i, instance in enumerate(instances) for b in _shifted(instance, i, first, last)]
    solution = solve(Problem(buffers=tuple(buffers)))
    plans = []
    for i, instance in enumerate(instances):
        offsets = {b.id: solution.offsets[_name(i, b)] for b in instance.plan.problem.buffers}
        placed = replace(instance.plan.solution, offsets=offsets, arena_size=solution.arena_size)
        plans.append(replace(instance.plan, solution=placed))
    return plans


def _shifted(
    instance: ProgramInstance, number: int, first: dict[tuple[int, bool], int], last: dict[tuple[int, bool], int]
) -> list[Buffer]:
    """Return the buffers of an instance, with live intervals in steps of the whole training step."""
    split, forward, backward = instance.plan.graph.forward_ops, (id(instance), False), (id(instance), True)

    def at(step: int, starts: dict[tuple[int, bool], int], *, late: bool) -> int:
        if late:  # without a backward, nothing is alive there
            return starts.get(backward, 0) + step - split
        return starts.get(forward, 0) + step

    moved = [
        (
            b,
            Interval(
                at(b.live.start, first, late=b.live.start >= split), at(b.live.end, last, late=b.live.end > split)
            ),
        )
        for b in instance.plan.problem.buffers
    ]
    return [replace(b, id=_name(number, b), live=live, gaps=()) for b, live in moved if not live.is_empty]


def _name(number: int, buffer: Buffer) -> str:
    return f"{number}.{buffer.id}"
