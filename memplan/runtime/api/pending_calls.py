"""Runs the calls of a compiled module of which several wait for their backward, in one arena.

GANs, siamese networks, contrastive pairs and rollouts call a module again before the backward of an earlier call has
run. From the first such call on, each program has an instance for each call in flight, and gradients are outside of the
arena. Calls without a backward take bytes that nothing in flight holds. Beyond a limit, calls run on the original.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from memplan.core.plan import Plan
from memplan.runtime.execute.instances import MAX_IN_FLIGHT, ProgramInstance, idle_instance
from memplan.runtime.execute.runner import Runner
from memplan.runtime.measured_budget import require_room
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import in_another_thread
from memplan.runtime.memory.arena_parts import ArenaPart
from memplan.runtime.memory.shared_arena import ArenaCoordinator, release_arenas
from memplan.runtime.options import CompileOptions

_log = logging.getLogger("memplan")


class PendingCalls:
    """Finds the instance of a program that runs a call. It is entered for each call, by one thread at a time.

    `most`: the calls that may wait for their backward. `before`: the arena of the call that was in flight when this
    began; it is freed after that call's backward, and gradients that are in it move out.
    """

    def __init__(self, options: CompileOptions, before: Arena, *, most: int = MAX_IN_FLIGHT) -> None:
        self.coordinator = ArenaCoordinator()
        self.most = most
        self._options = options
        self._before: Arena | None = before
        self._instances: dict[Runner, list[ProgramInstance]] = {}
        self._known: Collection[Runner] = ()
        self._calls = threading.RLock()
        self._warned = False

    def __enter__(self) -> PendingCalls:
        if not self._calls.acquire(blocking=False):
            raise in_another_thread()
        try:
            self._leave_the_first_arena()
            self.coordinator.place_last_step()
        except BaseException:
            self._calls.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.release()

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
                    require_room(self._options, runner.plan, self.nbytes - runner.plan.arena_size)
                return ProgramInstance(runner)
            require_room(self._options, runner.plan, self.nbytes)
            return ProgramInstance(like.another(self.coordinator))

        waiting = len(self.coordinator.waiting)
        if waiting < self.most or not runner.traced.training:
            found = idle_instance(
                instances,
                self.coordinator,
                make,
                most=self.most,
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
    def arenas(self) -> list[ArenaPart]:
        """The arenas of all programs and their instances."""
        of_instances = [one.arena for of in self._instances.values() for one in of]
        return of_instances + [runner.arena for runner in self._known if isinstance(runner.arena, ArenaPart)]

    @property
    def nbytes(self) -> int:
        """The bytes of all arenas of the programs and their instances, and of the one that was there before."""
        wholes = {id(arena.whole): arena.whole for arena in self.arenas}
        before = 0 if self._before is None else self._before.nbytes
        return before + sum(whole.held for whole in wholes.values())

    def _leave_the_first_arena(self) -> None:
        """Move gradients out of the arena of before, and free it, when the call that was in flight there is over."""
        arena = self._before
        if arena is None or arena.ownership.pending is not None:
            return
        with arena.ownership as ownership:
            ownership.require_free("another call")
            arena.release()
        self._before = None


def several_can_wait(options: CompileOptions) -> bool:
    """Return whether several calls can be in flight: not of recorded steps, or on other devices."""
    return not options.cuda_graph and options.device is None
