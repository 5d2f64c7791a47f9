"""The instances of a program: each is the same program with bytes of its own, and can have one call in flight."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch

from memplan.core.plan import Plan
from memplan.errors import MemplanError
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_parts import ArenaPart, ArenaSlot, ObservedOwnership, part_of
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.trace.traced import TracedGraph

_ADDRESSES = 4  # other addresses of an arena, at which the programs of an instance are kept
MAX_IN_FLIGHT = 64  # calls that wait for their backward; a further one runs eagerly


Smaller = tuple[TracedGraph, Plan]
AnInstance = TypeVar("AnInstance", bound="ProgramInstance")


class ProgramInstance:
    """A program with at most one call in flight, in an arena of its own or in the one that a coordinator shares out.

    `plan` is its plan as if it had an arena of its own; `runner` runs it where it is now. `smaller`: the step and the
    plan of the program that is to take its place.
    """

    def __init__(self, runner: Runner) -> None:
        """Make an instance of a program that was assembled in an arena part with an `ObservedOwnership`."""
        assert isinstance(runner.arena, ArenaPart)
        assert isinstance(runner.arena.ownership, ObservedOwnership)
        self.plan = runner.plan
        self.ownership = runner.arena.ownership
        self.ownership.instance = weakref.ref(self)
        self.slot: ArenaSlot | None = None
        self.layouts = 0
        self.smaller: Smaller | None = None
        self.use(runner)

    @property
    def placed(self) -> Plan:
        """Its plan at the offsets where it is now."""
        return self.runner.plan

    @property
    def arena(self) -> ArenaPart:
        """The arena in which it is now."""
        assert isinstance(self.runner.arena, ArenaPart)
        return self.runner.arena

    def use(self, runner: Runner) -> None:
        """Have this program run its calls from now on."""
        self.runner, self._address = runner, runner.arena.memory.data_ptr()
        self._elsewhere: dict[int, Runner] = {}  # the same at other addresses of its arena

    def move(self, plan: Plan, arena: ArenaPart) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while it is not in flight."""
        with torch.inference_mode(False):
            self.use(self.runner.remade(plan, arena))

    def follow(self) -> None:
        """Run where the memory of its arena is now, after that was freed and allocated again.

        The programs at the last few addresses are kept: allocators return to the same ones.
        """
        before, now = self._address, self.arena.memory.data_ptr()
        if now == before:
            return
        known = {address: at for address, at in self._elsewhere.items() if address != now}
        known = dict([*known.items(), (before, self.runner)][-_ADDRESSES:])
        found = self._elsewhere.get(now)
        with torch.inference_mode(False):
            self.runner = self.runner.remade(self.placed, self.arena) if found is None else found
        self._address, self._elsewhere = now, known

    def another(self, coordinator: ArenaCoordinator, module_guards: ModuleGuards | None = None) -> Runner:
        """Return the same program in an arena of its own; `module_guards`: with the parameters of another module."""
        with torch.inference_mode(False):
            arena = part_of(Arena(self.plan.arena_size, self.arena.device), ObservedOwnership(coordinator))
            return self.runner.remade(self.plan, arena, module_guards=module_guards)


def idle_instance(
    instances: list[AnInstance],
    coordinator: ArenaCoordinator,
    make: Callable[[], AnInstance],
    *,
    most: int,
    first: Callable[[AnInstance], bool],
    may_move: bool,
    make_smaller: Callable[[AnInstance, Smaller], AnInstance],
) -> AnInstance | None:
    """Return an instance that can run now, one of `first` if there is one, else a new one; None beyond the limit.

    `make` makes a new instance, of which there are `most`; then an idle one that is not of `first` is taken. With
    `may_move`, one of `first` whose place calls in flight hold, as they came in another order, moves instead.
    `make_smaller` makes what takes the place of one that is to be smaller; if its trial run fails, that one stays.
    """
    found = next((instance for instance in instances if first(instance) and coordinator.is_idle(instance)), None)
    if found is None and may_move:
        found = next((one for one in instances if first(one) and one.ownership.pending is None), None)
        if found is not None:
            coordinator.take_out(found)
    if found is None and len(instances) >= most:
        found = next(filter(coordinator.is_idle, instances), None)
    elif found is None:
        found = make()
        instances.append(found)
    if found is not None and found.smaller is not None:
        smaller, found.smaller = found.smaller, None
        with contextlib.suppress(MemplanError):
            made = make_smaller(found, smaller)
            instances[instances.index(found)] = made
            found = made
    if found is not None:
        coordinator.settle(found)
    return found
