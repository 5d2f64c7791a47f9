"""Describes what shares an arena: instances of programs, their places, and their reports to a coordinator."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memplan.core.plan import Plan
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight, LeftGradients

if TYPE_CHECKING:
    from memplan.runtime.memory.shared_arena import ArenaCoordinator


class ArenaUser(Protocol):
    """A program that can share an arena.

    `plan` is its plan alone, `placed` its plan where it is now; `slot` is its place in the shared arena, if it has one.
    """

    plan: Plan
    runner: Any
    slot: ArenaSlot | None
    layouts: int
    ownership: ObservedOwnership

    @property
    def placed(self) -> Plan: ...

    @property
    def arena(self) -> ArenaPart: ...

    def move(self, plan: Plan, arena: ArenaPart) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while it is not in flight."""


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


class ArenaPart(Arena):
    """The memory of an arena, `whole`, with an ownership of its own."""

    whole: Arena


class ObservedOwnership(ArenaOwnership):
    """An `ArenaOwnership` that reports each forward and backward of its instance to a coordinator.

    `instance` is set when the program is built. Steps of all instances of a coordinator exclude each other.
    """

    instance: weakref.ref[ArenaUser] | None = None

    def __init__(self, coordinator: ArenaCoordinator) -> None:
        super().__init__(_nothing, _nothing)
        self._coordinator = coordinator
        self._lock = coordinator.running
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, *, keep: bool) -> InFlight:
        """Start a step as `ArenaOwnership.begin` does, and report its forward."""
        step = super().begin(keep=keep)
        self._aside = []
        self._report(backward=False)
        return step

    def end(self, step: InFlight) -> None:
        """Start a backward as `ArenaOwnership.end` does, and report it; activations that were set aside return."""
        self.clear_left()
        super().end(step)
        self._report(backward=True)
        for place, saved in self._aside:
            place.copy_(saved)
        self._aside = []

    def repeat(self) -> None:
        """Start an earlier step again, and report its forward and its backward."""
        super().repeat()
        self._report(backward=True)

    def clear_left(self) -> None:
        """Move gradients of the last step out of the bytes that its instance uses."""
        if self._coordinator.left:
            instance = None if self.instance is None else self.instance()
            self._coordinator.clear_gradients(None if instance is None else instance.arena)

    @property
    def has_left(self) -> bool:
        """Whether gradients were left in an arena of the coordinator."""
        return bool(self._coordinator.left)

    @property
    def is_in_use(self) -> bool:
        """Whether a call of any instance waits for its backward, or the arena was freed for good."""
        instance = None if self.instance is None else self.instance()
        return bool(self._coordinator.waiting) or instance is None or instance.arena.whole.ownership.released

    def leave(self, gradients: LeftGradients) -> None:
        """Note the gradients that a backward leaves in the shared arena, or in that of its instance."""
        self._coordinator.left.append(gradients)

    def program_now(self, runner: Any) -> Any:
        """Return the program of its instance, which may have moved since `runner` ran; None if the instance is gone."""
        instance = None if self.instance is None else self.instance()
        if instance is None or instance.ownership.pending is not None:
            return None
        self._coordinator.settle(instance)
        return instance.runner

    @property
    def coordinator(self) -> ArenaCoordinator:
        """The coordinator to which it reports."""
        return self._coordinator

    @property
    def may_begin(self) -> bool:
        """Whether a step can begin now without overwriting activations."""
        instance = None if self.instance is None else self.instance()
        return super().may_begin and (
            instance is None or not self._coordinator.overwritten_by(instance, backward=False)
        )

    def share_with(self, whole: ArenaOwnership) -> None:
        """Drain copies and order streams as the whole arena does, which all its parts share."""
        self.drain, self.order_streams = whole.drain, whole.order_streams

    @property
    def is_aside(self) -> bool:
        """Whether copies of the activations in flight were made, because their bytes are used by another step."""
        return bool(self._aside)

    def set_aside(self, instance: ArenaUser) -> None:
        """Copy the activations in flight, which another step is about to overwrite."""
        plan, arena = instance.placed, instance.arena
        split, offsets = plan.graph.forward_ops, plan.solution.offsets
        saved = [b for b in plan.problem.buffers if b.size and b.live.start < split < b.live.end]
        places = [arena.bytes_at(offsets[b.id], offsets[b.id] + b.size) for b in saved]
        self.drain()
        self._aside = [(place, place.clone()) for place in places]

    def _report(self, *, backward: bool) -> None:
        instance = None if self.instance is None else self.instance()
        if instance is not None:
            self._coordinator.record_event(instance, backward=backward)


def part_of(arena: Arena, ownership: ObservedOwnership) -> ArenaPart:
    """Return the same memory with an ownership of its own."""
    ownership.share_with(arena.ownership)
    part: Any = copy.copy(arena)
    part.__class__ = ArenaPart
    part.ownership = ownership
    part.whole = arena  # keeps the whole arena alive
    return part  # type: ignore[no-any-return]


def _nothing() -> None:
    """Does nothing: it stands in until the ownership joins an arena."""
