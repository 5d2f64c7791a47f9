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
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import LeftGradients
from memplan.runtime.memory.arena_parts import ArenaPart, ArenaSlot, ArenaUser, StepLayout, part_of
from memplan.runtime.memory.joint_placement import InstanceEvent, completed_events, joint_plans

_MAX_LAYOUTS = 8  # of one instance: one whose order never repeats keeps its last layout, or an arena of its own
_MAX_EVENTS = 1024  # in one step
_SHRINKS_AFTER = 4  # steps with a backward that need less than the shared arena has
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
        self._needs: deque[int] = deque(
            maxlen=_SHRINKS_AFTER
        )  # the bytes of the arena for the last steps with a backward
        self.passed = PassedTensors()
        self.members: weakref.WeakSet[ArenaUser] = weakref.WeakSet()  # the instances that have run
        self.running = threading.Lock()
        self.calling = threading.RLock()
        self._lock = threading.Lock()
        self._events: list[InstanceEvent] = []
        self._waiting: list[ArenaUser] = []
        self._given_up = False
        self._conflicts = False
        self._shared: weakref.ref[Arena] | None = None
        self.left: list[LeftGradients] = []
        self.gradients_in_arena = True

    def clear_gradients(self, arena: Arena | None = None) -> None:
        """Move the gradients of the last step out of an arena, or out of any, before a step uses the bytes."""
        for gradients in tuple(self.left):
            if arena is None or gradients.arena.allocated is arena.allocated:
                gradients.clear()
                self.left.remove(gradients)

    @property
    def shared(self) -> Arena | None:
        """The arena that instances share; None until the first step is complete."""
        return None if self._shared is None else self._shared()

    @property
    def waiting(self) -> list[ArenaUser]:
        """The instances that wait for their backward, in the order of their forwards."""
        self._waiting = [user for user in self._waiting if user.ownership.pending is not None]
        return self._waiting

    def overwritten_by(self, instance: ArenaUser, *, backward: bool) -> list[ArenaUser]:
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

    def is_idle(self, instance: ArenaUser) -> bool:
        """Return whether an instance can run: not in flight itself, and without overwriting activations that are."""
        return instance.ownership.pending is None and not self.overwritten_by(instance, backward=False)

    def record_event(self, instance: ArenaUser, *, backward: bool) -> None:
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
            if any(e.backward for e in events):
                self._needs.append(max(instance.placed.arena_size for instance in instances))
                self._shrink(instances)
        finally:
            self.running.release()

    def _shrink(self, instances: Sequence[ArenaUser]) -> None:
        """Replace the shared arena by a smaller one, if the last steps needed less; other instances settle later.

        An arena in which all instances of a step keep a budget stays: others would need arenas beside a smaller one.
        """
        shared = self.shared
        if (
            self._prepare is not None
            or shared is None
            or len(self._needs) < _SHRINKS_AFTER
            or (most := max(self._needs)) >= shared.nbytes
        ):
            return
        if any(instance.arena.whole is not shared for instance in instances):
            return
        shared.release()
        smaller = Arena(most, shared.device)
        self._shared = weakref.ref(smaller)
        with torch.inference_mode(False):
            for instance in instances:
                _move(instance, instance.placed, part_of(smaller, instance.ownership))

    def settle(self, instance: ArenaUser) -> None:
        """Move an instance whose arena was freed to the same place in the shared arena, which is made again if need be.

        It gets an arena of its own if it has no place yet, or if the shared one is too small and in use.
        """
        if not instance.arena.whole.ownership.released:
            return
        plan, arena = instance.placed, self.shared
        with torch.inference_mode(False):
            if instance.slot is None:
                arena = None
            elif arena is None or arena.ownership.released or (arena.nbytes < plan.arena_size and not self.waiting):
                arena = self._make_room(plan.arena_size, (instance,))
            if arena is None or arena.nbytes < plan.arena_size:
                instance.slot, plan = None, instance.plan
                arena = Arena(plan.arena_size, instance.arena.device)
            instance.move(plan, part_of(arena, instance.ownership))

    def take_out(self, instance: ArenaUser) -> None:
        """Move an instance that is not in flight to an arena of its own, as calls in flight hold bytes of its place."""
        with torch.inference_mode(False):
            arena = Arena(instance.plan.arena_size, instance.arena.device)
            instance.move(instance.plan, part_of(arena, instance.ownership))
        instance.slot = None

    def _lay_out(self, instances: Sequence[ArenaUser], events: Sequence[InstanceEvent]) -> None:
        """Place all buffers of all instances in the shared arena, and move the instances there."""
        alone = len(instances) == 1
        position = {id(instance): i for i, instance in enumerate(instances)}
        timeline = tuple(dict.fromkeys((position[id(e.instance)], e.backward) for e in events))
        self._layouts += 1
        layout = StepLayout(self._layouts, tuple(map(weakref.ref, instances)), timeline)
        if alone and self.shared is None and not instances[0].arena.whole.ownership.released:
            # its own arena becomes the shared one
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
            if not _move(instance, plan, part_of(shared, instance.ownership)):
                continue
            none: frozenset[int] = frozenset()
            left = (in_flight.get((id(instance), False), none), in_flight.get((id(instance), True), none))
            instance.slot = ArenaSlot(layout, left)
            instance.layouts += 1

    def _make_room(self, nbytes: int, instances: Sequence[ArenaUser]) -> Arena:
        """Return the shared arena, with at least `nbytes` bytes; arenas that are left or replaced are freed first."""
        shared = self.shared
        for instance in instances:
            if instance.arena.whole is not shared and not instance.arena.whole.ownership.released:
                instance.arena.whole.release()
        if shared is None or shared.ownership.released or shared.nbytes < nbytes:
            if shared is not None and not shared.ownership.released:
                shared.release()
            shared = Arena(nbytes, instances[0].arena.device)
            self._shared = weakref.ref(shared)
        return shared


def release_arenas(instances: Iterable[ArenaUser]) -> bool:
    """Free the arenas of instances of any coordinators; the instances settle in others when they run again.

    Returns False, and frees nothing, if a call waits for its backward, another thread runs one, or a gradient of the
    last step cannot be moved out of the arena.
    """
    of: dict[ArenaCoordinator, list[ArenaUser]] = {}
    for instance in instances:
        of.setdefault(instance.ownership.coordinator, []).append(instance)
    with contextlib.ExitStack() as held:
        for coordinator in of:
            for lock in (coordinator.calling, coordinator.running):
                if not lock.acquire(blocking=False):
                    return False
                held.callback(lock.release)
            if coordinator.waiting:
                return False
            try:
                coordinator.clear_gradients()
            except MemplanError:
                return False
        for arena in {instance.arena.whole for members in of.values() for instance in members}:
            if not arena.ownership.released:
                arena.release()
    return True


def _move(instance: ArenaUser, plan: Plan, arena: ArenaPart) -> bool:
    """Move an instance, unless the model is no longer what it was traced for: the call that selects it will say so."""
    try:
        instance.move(plan, arena)
    except InputMismatch:
        instance.slot = None
        return False
    return True
