"""The instances of a program: each is the same program with bytes of its own, and can have one call in flight."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from memplan.core.plan import Plan
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.shared_arena import ArenaCoordinator, ArenaSlot, release_arenas
from memplan.runtime.options import CompileOptions

MAX_IN_FLIGHT = 64  # calls that wait for their backward; a further one runs eagerly
AnInstance = TypeVar("AnInstance", bound="ProgramInstance")


class ProgramInstance:
    """A program with at most one call in flight, in an arena of its own or in the one that a coordinator shares out.

    `plan` is its plan as if it had an arena of its own; `runner` runs it where it is now.
    """

    def __init__(self, runner: Runner) -> None:
        """Make an instance of a program that was assembled in an `arena_of_its_own` of a coordinator."""
        self.runner, self.plan = runner, runner.plan
        self.ownership = runner.arena.ownership
        self.ownership.instance = weakref.ref(self)
        self.slot: ArenaSlot | None = None
        self.layouts = 0

    @property
    def arena(self) -> Arena:
        """The arena in which it is now."""
        return self.runner.arena

    def move(self, plan: Plan, arena: Arena) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while it is not in flight."""
        with torch.inference_mode(False):
            self.runner = self.runner.remade(plan, arena.part(self.ownership))

    def another(self, coordinator: ArenaCoordinator, module_guards: ModuleGuards | None = None) -> Runner:
        """Return the same program in an arena of its own; `module_guards`: with the parameters of another module."""
        with torch.inference_mode(False):
            arena = coordinator.arena_of_its_own(self.plan.arena_size, self.arena.device)
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


_log = logging.getLogger("memplan")


class PendingCalls:
    """Finds the instance of a program that runs a call, for one thread at a time.

    `before`: the arena of the call that was in flight when this began; it is freed after that call's backward, and
    gradients that are in it move out.
    """

    def __init__(self, options: CompileOptions, before: Arena) -> None:
        self.coordinator = ArenaCoordinator()
        self._options = options
        self._before: Arena | None = before
        self._instances: dict[Runner, list[ProgramInstance]] = {}
        self._known: Collection[Runner] = ()
        self._warned = False

    def begin(self) -> None:
        """Place the programs of the last step before a call, if nothing is in flight."""
        self._leave_the_first_arena()
        self.coordinator.place_last_step()

    def program(self, runner: Runner, known: Collection[Runner]) -> Runner | None:
        """Return the program that runs a call now, in bytes that no call in flight holds; None beyond the limit.

        `known`: the programs of the module, of which the instances are kept. Raises `BudgetInfeasible` if another
        instance would exceed the budget.
        """
        if runner not in self._instances:
            self._instances = {one: of for one, of in self._instances.items() if one in known}
        instances = self._instances.setdefault(runner, [])
        self._known = known

        def make(like: ProgramInstance | None) -> ProgramInstance:
            """Return the first instance, which the program itself is, or a copy of another one."""
            if like is None:
                if self.coordinator.waiting or self._before is not None:
                    self._options.require_room(runner.plan, self.nbytes - runner.plan.arena_size)
                return ProgramInstance(runner)
            self._options.require_room(runner.plan, self.nbytes)
            return ProgramInstance(like.another(self.coordinator))

        waiting = len(self.coordinator.waiting)
        if waiting < MAX_IN_FLIGHT or not runner.traced.training:
            found = idle_instance(
                instances,
                self.coordinator,
                make,
                most=MAX_IN_FLIGHT,
                first=lambda _: True,
                may_move=not self._options.has_budget,
            )
            if found is not None:
                return found.runner
        if not self._warned:
            self._warned = True
            what = (
                "%s: %d calls wait for their backward; further ones run eagerly until one has run; this is logged once"
            )
            _log.warning(what, runner.plan.model, waiting)
        return None

    def release(self) -> bool:
        """Free the arena until its programs run again. Returns False, and frees nothing, while a call is in flight."""
        return self._before is None and release_arenas(one for of in self._instances.values() for one in of)

    def plan_of(self, runner: Runner) -> Plan | None:
        """Return the plan of the first instance of a program, as if it had an arena of its own; None if it has none."""
        instances = self._instances.get(runner)
        return instances[0].plan if instances else None

    @property
    def arenas(self) -> list[Arena]:
        """The arenas of all programs and their instances."""
        return [one.arena for of in self._instances.values() for one in of] + [runner.arena for runner in self._known]

    @property
    def nbytes(self) -> int:
        """The bytes of all arenas of the programs and their instances, and of the one that was there before."""
        before = 0 if self._before is None else self._before.nbytes
        return before + sum({id(arena.memories): arena.held for arena in self.arenas}.values())

    def _leave_the_first_arena(self) -> None:
        """Move gradients out of the arena of before, and free it, when the call that was in flight there is over."""
        arena = self._before
        if arena is None or arena.ownership.pending is not None:
            return
        with arena.ownership as ownership:
            ownership.require_free("another call")
            arena.empty()
        self._before = None


def several_can_wait(options: CompileOptions) -> bool:
    """Return whether several calls can be in flight: not of recorded steps, or on several devices."""
    return not (options.cuda_graph or options.several_devices)
