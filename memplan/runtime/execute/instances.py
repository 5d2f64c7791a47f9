"""The instances of a program: each is the same program with bytes of its own, and can have one call in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from memplan.core.plan import Plan
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_parts import ArenaPart, ArenaSlot, ObservedOwnership, part_of
from memplan.runtime.memory.shared_arena import ArenaCoordinator

MAX_IN_FLIGHT = 64  # calls that wait for their backward; a further one runs eagerly
AnInstance = TypeVar("AnInstance", bound="ProgramInstance")


class ProgramInstance:
    """A program with at most one call in flight, in an arena of its own or in the one that a coordinator shares out.

    `plan` is its plan as if it had an arena of its own; `runner` runs it where it is now.
    """

    def __init__(self, runner: Runner) -> None:
        """Make an instance of a program that was assembled in an arena part with an `ObservedOwnership`."""
        assert isinstance(runner.arena, ArenaPart)
        assert isinstance(runner.arena.ownership, ObservedOwnership)
        self.runner, self.plan = runner, runner.plan
        self.ownership = runner.arena.ownership
        self.ownership.instance = weakref.ref(self)
        self.slot: ArenaSlot | None = None
        self.layouts = 0

    @property
    def placed(self) -> Plan:
        """Its plan at the offsets where it is now."""
        return self.runner.plan

    @property
    def arena(self) -> ArenaPart:
        """The arena in which it is now."""
        assert isinstance(self.runner.arena, ArenaPart)
        return self.runner.arena

    def move(self, plan: Plan, arena: ArenaPart) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while it is not in flight."""
        with torch.inference_mode(False):
            self.runner = self.runner.remade(plan, arena)

    def another(self, coordinator: ArenaCoordinator, module_guards: ModuleGuards | None = None) -> Runner:
        """Return the same program in an arena of its own; `module_guards`: with the parameters of another module."""
        with torch.inference_mode(False):
            arena = part_of(Arena(self.plan.arena_size, self.arena.device), ObservedOwnership(coordinator))
            return self.runner.remade(self.plan, arena, module_guards=module_guards)


def idle_instance(
    instances: list[AnInstance],
    coordinator: ArenaCoordinator,
    make: Callable[[AnInstance | None], AnInstance],
    *,
    most: int,
    first: Callable[[AnInstance], bool],
    may_move: bool,
) -> AnInstance | None:
    """Return an instance that can run now, one of `first` if there is one, else a new one; None beyond the limit.

    `make` makes a new instance like another one, if there is one, of which there are `most`; then an idle one that is
    not of `first` is taken. With `may_move`, one of `first` whose place calls in flight hold, as they came in another
    order, moves instead.
    """
    found = next((instance for instance in instances if first(instance) and coordinator.is_idle(instance)), None)
    if found is None and may_move:
        found = next((one for one in instances if first(one) and one.ownership.pending is None), None)
        if found is not None:
            coordinator.take_out(found)
    if found is None and len(instances) >= most:
        found = next(filter(coordinator.is_idle, instances), None)
    elif found is None:
        found = make(next(iter(instances), None))
        instances.append(found)
    if found is not None:
        coordinator.settle(found)
    return found
