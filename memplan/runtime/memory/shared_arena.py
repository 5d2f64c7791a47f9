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
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, StaleActivationsError
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import LeftGradients
from memplan.runtime.memory.arena_parts import ArenaPart, ArenaSlot, ArenaUser, StepLayout, part_of
from memplan.runtime.memory.handed_gradients import HandedGradients
from memplan.runtime.memory.joint_placement import InstanceEvent, completed_events, joint_plans
from memplan.runtime.memory.passed_tensors import PassedTensors

_MAX_LAYOUTS = 8  # of one instance: one whose order never repeats keeps its last layout, or an arena of its own
_MAX_EVENTS = 1024  # in one step
_MAX_COMPARED = 16  # steps of a new kind, whose memory is compared with eager's
_MORE_CALLS = 2  # times as many calls of a program in a step as before make it one of a new kind
_SHRINKS_AFTER = 4  # steps with a backward that need less than the shared arena has
PrepareStep = Callable[[Sequence[Any], Sequence[tuple[int, bool]]], None]


class ArenaCoordinator:
    """Records the order in which instances run, and places them in one arena when a step is complete.

    `running` is held while a step of any instance runs, and while instances move. `calling` is held by a call from when
    it chooses an instance until that has run. `prepare` is called with the instances and the timeline of a step before
    they are placed together; it may replace their plans.

    `left` are the gradients that the last backward has left in the arena: they move out before anything else uses its
    bytes. That is right for steps of one instance with a backward alone: `gradients_in_arena` is False from the first
    step with several on, or once gradients of a step were still in use when the next one began.
    """

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self._prepare = prepare
        self._layouts = 0
        # of the last steps with a backward: the bytes of the shared arena that each needs, and its instances; where
        # these are to be made, the parameters (by id) of those that they replace
        self._needs: deque[tuple[int, weakref.WeakSet[ArenaUser] | frozenset[int]]] = deque(maxlen=_SHRINKS_AFTER)
        self.passed = PassedTensors()
        self.handed = HandedGradients()
        self.members: weakref.WeakSet[ArenaUser] = weakref.WeakSet()  # the instances that have run
        self._compared = 0
        self._asked: list[tuple[Counter[int], Hashable]] = []
        # the most calls of each program in compared steps
        self._calls: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
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

    @property
    def has_new_kind(self) -> bool:
        """Whether the last step is complete, and has more calls of a program, or others, than those compared so far."""
        if self._compared >= _MAX_COMPARED or self.waiting or not any(e.backward for e in self._events):
            return False
        return any(calls >= _MORE_CALLS * self._calls.get(program, 0) for program, calls in self._calls_now().items())

    def is_new_question(self, question: Hashable) -> bool:
        """Return whether the memory of the last step was never compared with eager's so; note that it is now.

        `question`: what an answer depends on, beside the programs of the step.
        """
        asked = Counter(map(id, self._calls_now().elements())), question
        if asked in self._asked or self._compared >= _MAX_COMPARED:
            return False
        self._asked.append(asked)
        self._compared += 1
        for program, calls in self._calls_now().items():
            self._calls[program] = max(calls, self._calls.get(program, 0))
        return True

    def _calls_now(self) -> Counter[object]:
        """Return the calls of each program that the last step had in flight, each instance once."""
        instances = {id(e.instance): e.instance for e in self._events}
        return Counter(one.program for one in instances.values())

    def vacate(self, has_backward: bool) -> None:
        """Have the gradients of the last step moved out of the arena, before a step with a backward or without.

        Raises `GradientsInUse` if they are to be outside of the arena from now on.
        """
        for gradients in self.left:
            gradients.vacate(has_backward)
        self.left.clear()

    def clear_gradients(self, memory: torch.Tensor | None = None) -> None:
        """Move the gradients of the last step out of an arena with these bytes, or out of any.

        Raises `StaleActivationsError` if something else than a `.grad` refers to one.
        """
        for gradients in tuple(self.left):
            if memory is None or gradients.arena.memory is memory:
                gradients.clear()
                self.left.remove(gradients)

    def put_gradients_outside(self) -> None:
        """Move the gradients of the last step out of the arena, and free it; later programs have them outside.

        An arena with gradients that cannot be moved is left to what refers to them.
        """
        self.gradients_in_arena = False
        left, self.left = self.left, []
        with self.running:
            for gradients in left:
                cleared = gradients.try_to_clear()
                if not cleared or not self.waiting:
                    gradients.give_up_arena(free=cleared)
            if not self.waiting:
                self._events, self._shared = [], None

    @property
    def step_so_far(self) -> list[InstanceEvent]:
        """The forwards and backwards of the step that has begun, in their order; none once the next one has."""
        with self._lock:
            return list(self._events)

    def needed_by_others(self, instances: Sequence[ArenaUser]) -> int:
        """Return the bytes of the arena that recent steps of none of these instances need."""
        own = _parameters(instances)

        def of_others(of: weakref.WeakSet[ArenaUser] | frozenset[int]) -> bool:
            return own.isdisjoint(of) if isinstance(of, frozenset) else not any(one in of for one in instances)

        return max((need for need, of in self._needs if of and of_others(of)), default=0)

    def forget_step(self, nbytes: int, instances: Iterable[ArenaUser] = ()) -> None:
        """Place the instances of the step that has begun no more: others, which need `nbytes`, take their place."""
        self._needs.append((nbytes, _parameters(instances)))
        with self._lock:
            self._events = []

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
                need = max(instance.placed.arena_size for instance in instances)
                self._needs.append((need, weakref.WeakSet(instances)))
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
            or (most := max(need for need, _ in self._needs)) >= shared.nbytes
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


def _parameters(instances: Iterable[ArenaUser]) -> frozenset[int]:
    """Return the parameters and buffers that instances use, by id."""
    return frozenset(id(tensor) for one in instances for tensor in one.runner.parameter_guards.tensors())


def release_arenas(instances: Iterable[ArenaUser], *, lend: bool = False) -> bool:
    """Free the arenas of instances of any coordinators; the instances settle in others when they run again.

    `lend`: give the bytes back only until then, and leave the instances where they are. Returns False, and frees
    nothing, if a call waits for its backward, another thread runs one, or a gradient of the last step cannot be moved
    out of the arena.
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
            except StaleActivationsError:
                return False
        for arena in {instance.arena.whole for members in of.values() for instance in members}:
            if lend:
                arena.give_back()
            elif not arena.ownership.released:
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
