"""Runs the calls of a compiled module of which several wait for their backward, in one arena.

GANs, siamese networks, contrastive pairs and rollouts call a module again before the backward of an earlier call has
run. From the first such call on, each program has an instance for each call in flight, and gradients are outside of the
arena. Calls without a backward take bytes that nothing in flight holds. Beyond a limit, calls run on the original.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.runtime.execute.arena_gradients import GradientsInUse
from memplan.runtime.execute.instances import MAX_IN_FLIGHT, ProgramInstance, Smaller, idle_instance
from memplan.runtime.execute.runner import Runner
from memplan.runtime.measured_budget import Built, outside_of_arena
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
        self._replaced: list[ProgramInstance] = []  # whose backward may run (again)
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

    def program(
        self, runner: Runner, known: Collection[Runner], make_smaller: Callable[[Smaller], Runner]
    ) -> Runner | None:
        """Return the program that runs a call now, in bytes that no call in flight holds; None beyond the limit.

        `known`: the programs of the module, of which the instances are kept. `make_smaller` makes the program that
        takes the place of one that is to be smaller. Raises `BudgetInfeasible` if another instance would exceed the
        budget.
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

        def retire(one: ProgramInstance) -> None:
            """Keep an instance that was replaced as long as its backward may run (again)."""
            self._replaced = [old for old in (*self._replaced, one) if old.ownership.has_graph]

        waiting = len(self.coordinator.waiting)
        if waiting < self.most or not runner.traced.training:
            found = idle_instance(
                instances,
                self.coordinator,
                make,
                most=self.most,
                first=lambda _: True,
                may_move=not self._options.has_budget,
                make_smaller=lambda smaller: ProgramInstance(make_smaller(smaller)),
                retire=retire,
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

    def release(self, *, lend: bool = False) -> bool:
        """Free the arena until its programs run again. Returns False, and frees nothing, while a call is in flight.

        `lend`: as in `release_arenas`.
        """
        if self._before is not None:
            return False
        return release_arenas((one for of in self._instances.values() for one in of), lend=lend)

    def plan_of(self, runner: Runner) -> Plan | None:
        """Return the plan of the first instance of a program, as if it had an arena of its own; None if it has none."""
        instances = self._instances.get(runner)
        return instances[0].plan if instances else None

    def give_up_arena(self) -> bool:
        """Free the arena, and have its programs replaced by those that allocate what they need while they run.

        Returns False, and changes nothing, while a call is in flight.
        """
        if not self.release():
            return False
        self.coordinator.forget_step(0)
        for instances in self._instances.values():
            for one in instances:
                if one.plan.arena_size:
                    one.smaller = outside_of_arena(self._options, Built(traced=one.runner.as_traced, runner=one.runner))
        return True

    @property
    def nbytes(self) -> int:
        """The bytes of all arenas of the programs and their instances, and of the one that was there before."""
        arenas = [i.arena for instances in self._instances.values() for i in instances]
        arenas += [runner.arena for runner in self._known if isinstance(runner.arena, ArenaPart)]
        wholes = {id(arena.whole): arena.whole for arena in arenas}
        before = 0 if self._before is None else self._before.nbytes
        return before + sum(whole.held for whole in wholes.values())

    def _leave_the_first_arena(self) -> None:
        """Move gradients out of the arena of before, and free it, when the call that was in flight there is over."""
        arena = self._before
        if arena is None or arena.ownership.pending is not None:
            return
        self._before = None
        with arena.ownership as ownership:
            try:
                ownership.require_free("another call")
            except GradientsInUse as error:
                error.gradients.move_out()
                if error.gradients.holder():  # its bytes stay for as long as something refers to them
                    return
            arena.release()


def require_room(options: CompileOptions, plan: Plan, held: int) -> None:
    """Raise `BudgetInfeasible` if another call of `plan` in flight, beside arenas of `held` bytes, breaks a budget."""
    kept = plan.eviction
    if kept is None:
        return
    total = (options.budget, kept.budget, plan.total + held)
    arena = (options.arena_budget, kept.arena_budget, plan.arena_size + held)
    for given, limit, need in (total, arena):
        if given is not None and limit is not None and need > limit:
            raise BudgetInfeasible(
                f"another call while one waits for its backward needs {format_bytes(need)} in all, the budget is "
                f"{format_bytes(limit)}",
                op="",
                smallest=need,
                where="a second call in flight",
                hint=f"call backward first, drop what the earlier call returned, or give at least {need} bytes",
            )


def several_can_wait(options: CompileOptions) -> bool:
    """Return whether several calls can be in flight: not of recorded steps, on other devices, or with gradients that
    are promised to be in the arena."""
    return not options.cuda_graph and options.device is None and options.gradients != "arena"
