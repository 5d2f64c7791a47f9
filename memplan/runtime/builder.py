"""Builds programs: plans what was traced, tries it, and plans again with what its kernels allocate, in one arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.core.totals import known_transient
from memplan.core.units import format_bytes
from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import pin
from memplan.errors import BudgetInfeasible
from memplan.planning.fit import plan_again
from memplan.planning.measured import no_more_than_eager
from memplan.planning.memory_answer import physical_memory
from memplan.planning.outside_arena import plan_partly_outside
from memplan.planning.planfile import require_budget
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.cuda_graphs import Recorder, make_recorder
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.kernels import BoundOp
from memplan.runtime.memory.arena import Arena, arena_for
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import Measured, RunOptions
from memplan.runtime.profiling.op_timer import measured_costs
from memplan.runtime.profiling.profile_guided import ProfileGuide
from memplan.trace import CapturedCall
from memplan.trace.default_kernels import made_by_default
from memplan.trace.graph.remap_to_plan import outside_as_in
from memplan.trace.traced import TracedGraph

_TRIES = 4
_Planned = tuple[TracedGraph, Plan]
_Options = TypeVar("_Options", bound=RunOptions)
_Made = TypeVar("_Made")


class ProgramBuilder(Generic[_Options]):
    """Builds programs of one module. Refusals are raised before an arena is allocated.

    `options` are those of the next program. `arena` is the arena that all programs share, one at a time; the first
    program allocates it, and it grows if a later one needs more. With a `coordinator`, which places programs in its own
    arena, each program begins in an arena of its own. `added`, `whole`: as in `Runner`. `hooks` observe the programs.
    `make_room` is called with the options and the plan of a program before an arena is allocated for it.
    """

    guards: ModuleGuards

    def __init__(
        self,
        options: _Options,
        name: str,
        hooks: Hooks,
        coordinator: ArenaCoordinator | None = None,
        *,
        added: bool = False,
        whole: bool = False,
    ) -> None:
        self.options, self.hooks, self.coordinator = options, hooks, coordinator
        self.make_room: Callable[[Any, Plan], None] = _nothing_beside
        self.arena: Arena | None = None
        self._name, self._added, self._whole = name, added, whole
        self._recorder: Recorder | None = None
        self._made: list[Arena] | None = None  # what is allocated while programs are built

    def by_default(self, make: Callable[[], _Made]) -> _Made:
        """Return what `make` makes by the options, which are eager's kernels from now on if the default's fail."""

        def made(options: _Options) -> _Made:
            self.options = options
            return make()

        with torch.inference_mode(False):
            self.options, found = made_by_default(self.options, self._name, made)
        return found

    def programs(
        self,
        steps: Sequence[tuple[TracedGraph, CapturedCall | None]],
        given: Plan | None = None,
        *,
        others: Sequence[Plan] = (),
        keep_example: bool = False,
    ) -> tuple[list[Runner], list[ProfileGuide]]:
        """Return a program for each step, with the `given` plan or one that is made with what its trial run measures.

        The guides measure those programs whose plans evict something, if steps are measured. `steps`: each as it is
        traced first, and what traces its other variants. `others`: plans that run in the arena too. `keep_example`: the
        programs keep the tensors of the example, on which another plan may be tried.

        Raises `BudgetInfeasible` where no plan keeps the budgets.
        """
        measures = self.options.measures
        costs = None if measures else self.options.costs  # guides decide again, with those of the first steps
        options = self.options = replace(self.options, costs=costs)
        room = 0 if self.arena is None else self.arena.nbytes
        planned: list[_Planned] = []
        over: list[Plan] = []

        def build(known: Sequence[Measured | None]) -> Sequence[Runner]:
            """Return the programs, planned with what is measured of each."""
            if others:
                self._free_made()  # of the programs that were tried before
            planned[:] = [self._planned(step, given, one, room) for step, one in zip(steps, known, strict=True)]
            if given is None:
                planned[:] = self._in_one_arena(planned, known, room)
            return self._placed(planned, others, room)

        def less(made: Sequence[Runner], known: Sequence[Measured | None]) -> Sequence[Measured | None] | None:
            over[:] = [one.plan for one in made if excess(one) > 0]
            if not over:
                return None
            now = [measured(one, before) for one, before in zip(made, known, strict=True)]
            if not room:  # no other programs run in their arena
                discard(made)
            return now

        self._made = []
        try:
            first: Sequence[Measured | None] = [None] * len(steps)
            again = partial(plan_again, build, less, tries=1 if given is not None else _TRIES)
            made, kept = again(first)
            if not kept:
                raise infeasible(over[0])
            if given is None and not measures and self._depends_on_costs(made):
                made = self._by_measured_costs(made, planned, again, others, room)
            several = any(len(traced.runs_on) > 1 for traced, _ in steps)
            outgrown = not options.has_budget and any(one.plan.arena_size > room for one in made)
            alone = len(steps) == 1 or not options.has_budget
            if given is None and not measures and not several and alone and (not room or outgrown):
                made = self._smaller(made, planned, others, room)
        except BaseException:
            self._free_made()  # what was built may be kept alive by the error's traceback
            raise
        finally:
            self._made = None
        evicting = [one for one in made if one.plan.evictions] if measures else []
        guides = [ProfileGuide(options, one, partial(self.assemble, one.as_traced)) for one in evicting]
        for one in () if keep_example else made:
            one.forget_example()
        return list(made), guides

    def assemble(
        self, traced: TracedGraph, plan: Plan, room: int = 0, bound: tuple[BoundOp, ...] | None = None
    ) -> Runner:
        """Return the program of a plan. `room`: the least size of the arena in bytes; `bound`: as in `Runner`."""
        if traced.runs_on:
            require_host_memory(plan)
            if is_accelerator(traced.device):  # the tensors stay the same objects
                pin(self.guards.tensors())
        if self.options.cuda_graph and self._recorder is None:
            self._recorder = make_recorder(traced.device, self.options.sanitize)
        with torch.inference_mode(False), timed(f"making the program of {plan.model}, and running it once"):
            return Runner(
                self.guards,
                traced,
                plan,
                self._arena_for(plan, traced.device, room),
                sanitize=self.options.sanitize,
                added=self._added,
                recorder=self._recorder,
                whole=self._whole,
                bound=bound,
                hooks=self.hooks,
            )

    def free_arena(self) -> None:
        """Free the arena before all programs are made again. Raises `ArenaInUse` if a step is in flight."""
        if self.arena is not None:
            with self.arena.ownership as ownership:
                ownership.require_free("another program")
                self.arena.empty()

    def _free_made(self) -> None:
        for arena in self._made or ():
            arena.empty()

    def _smaller(
        self, made: Sequence[Runner], planned: list[_Planned], others: Sequence[Plan], room: int
    ) -> Sequence[Runner]:
        """Return the programs, or in their place those that need no more than eager (less, for the smallest budget)."""
        smaller = [smaller_plan(self.options, one) for one in made]
        fewer = [
            found is not None and not (room and with_arena(found[1], room) >= with_arena(one.plan, room))
            for found, one in zip(smaller, made, strict=True)
        ]
        if not any(fewer):
            return made
        before, needed = list(planned), on_device(made[0])
        planned[:] = [now if found is None else found for found, now in zip(smaller, planned, strict=True)]
        discard(made)
        del made
        found = self._placed(planned, others, room)
        if self.options.budget == "min" and on_device(found[0]) > needed:  # its kernels take more than those of
            discard(found)  # the first one
            found = self._placed(before, others, room)
        return found

    def _depends_on_costs(self, made: Sequence[Runner]) -> bool:
        """Return whether costs that nobody gave decide what is evicted, on an accelerator, where ops can be timed in
        some milliseconds: ranks have one plan, and cannot have each their own costs."""
        plans = [one.plan for one in made]
        one_device = is_accelerator(made[0].traced.device) and not any(p.devices or p.collectives for p in plans)
        return one_device and self.options.costs is None and any(p.evictions for p in plans)

    def _by_measured_costs(
        self,
        made: Sequence[Runner],
        planned: list[_Planned],
        again: Callable[[Sequence[Measured | None]], tuple[Sequence[Runner], bool]],
        others: Sequence[Plan],
        room: int,
    ) -> Sequence[Runner]:
        """Return the programs whose evictions are decided by what ops and copies are measured to take; those that were
        decided by the costs of the kind of device, if none keeps the budget."""
        options, before, known = self.options, list(planned), [measured(one, None) for one in made]
        if not room:  # as between the tries of `programs`; ops are measured in memory of their own
            discard(made)
        with timed(f"measuring the ops and copies of {made[0].plan.model}"):
            self.options = replace(options, costs=measured_costs(made))
        del made
        try:
            found, kept = again(known)
        except BudgetInfeasible:
            kept = False
        finally:
            self.options = options
        if kept:
            return found
        planned[:] = before
        return self._placed(before, others, room)

    def _planned(
        self, step: tuple[TracedGraph, CapturedCall | None], given: Plan | None, known: Measured | None, room: int
    ) -> _Planned:
        """Return the variant of a step that is planned, and its plan."""
        if known is not None:
            return self.options.replan(known, room=room)
        return self.options.settle(*step, given, room=room)

    def _in_one_arena(self, planned: Sequence[_Planned], known: Sequence[Measured | None], room: int) -> list[_Planned]:
        """Return the plans, each with an arena that leaves every other program the room that its budget needs.

        Where each needs the fewest bytes that it can, the largest decides.
        """
        limits = [] if self.options.budget == "min" else _limits_of_totals([plan for _, plan in planned])
        found = []
        for (traced, plan), one in zip(planned, known, strict=True):
            if len(planned) > 1 and plan.eviction is not None and limits and plan.arena_size > min(limits):
                tried = replace(plan, eviction=replace(plan.eviction, arena_budget=min(limits)))
                transient = known_transient(traced.graph) if one is None else one.transient
                step = Measured(traced=traced, plan=tried, transient=transient)
                traced, plan = self._planned((traced, None), None, step, room)  # noqa: PLW2901
            found.append((traced, plan))
        return found

    def _placed(self, planned: Sequence[_Planned], others: Sequence[Plan], room: int) -> list[Runner]:
        """Return the programs of some plans, in an arena that has room for them and for others."""
        made = [self.assemble(traced, plan) for traced, plan in planned]
        for plan in others:
            made[0].arena.fit(plan)
        if self.options.budget == "min" or (room and not others and not self.options.budget_is_absolute):
            for one in made:
                adopt_need(one)
        return made

    def _arena_for(self, plan: Plan, device: torch.device, room: int) -> Arena:
        """Return the shared arena, which grows if the plan does not fit; its smaller blocks are freed first.

        Raises `ArenaInUse` if a step is in flight.
        """
        require_budget(plan)
        if self.coordinator is not None:
            self.make_room(self.options, plan)
            arena = self.coordinator.arena_of_its_own(plan.arena_size, device)
        elif self.arena is None:
            self.make_room(self.options, plan)
            arena = self.arena = arena_for(plan, device, room)
        elif self.arena.fits(plan, room):
            return self.arena
        else:
            arena = self.arena
            with arena.ownership as ownership:
                ownership.require_free("a program that needs a larger arena")
            self.make_room(self.options, plan)
            arena.fit(plan, room)
        if self._made is not None:
            self._made.append(arena)
        return arena


def _limits_of_totals(plans: Sequence[Plan]) -> list[int]:
    """Return the most bytes that the arena of each plan with a budget of its total may have, on one device."""
    limited = [plan for plan in plans if plan.eviction is not None and plan.eviction.budget is not None]
    return [plan.arena_limit for plan in limited if plan.arena_limit is not None and not plan.devices]


def require_host_memory(plan: Plan) -> None:
    """Raise `BudgetInfeasible` if the host has less memory than a step whose model stays there takes of it."""
    has = physical_memory()
    if plan.on_host > has:
        what = (
            f"needs {format_bytes(plan.on_host)} of the host's memory beside {format_bytes(plan.on_device)} on the "
            f"device, and the host has {format_bytes(has)}"
        )
        hint = "give host_budget= to keep fewer copies there, a smaller batch, or a machine with more memory"
        raise BudgetInfeasible(what, op="", smallest=plan.on_host, where="the host", hint=hint)


def _nothing_beside(options: RunOptions, plan: Plan) -> None:
    """Free nothing: there are no other arenas of the model."""


def with_arena(plan: Plan, room: int) -> int:
    """Return the bytes on the device at the peak of a plan in an arena that has at least `room` bytes."""
    return plan.on_device + max(room - plan.arena_size, 0)


def discard(made: Sequence[Runner]) -> None:
    """Free the arena of programs that nobody will run, although there may still be references to them."""
    for runner in made:
        runner.arena.empty()


def excess(runner: Runner) -> int:
    """Return the bytes by which a program exceeds its budget in the arena that it runs in; at most 0 if it keeps it."""
    plan = runner.plan
    kept = plan.eviction
    if kept is None or plan.redzone:
        return 0
    if plan.devices:
        totals = [(plan.on_section(section), section.budget) for section in plan.devices]
        return max((total - limit for total, limit in totals if limit is not None), default=0)
    return 0 if kept.budget is None else on_device(runner) - kept.budget


def smaller_plan(options: RunOptions, runner: Runner) -> tuple[TracedGraph, Plan] | None:
    """Return the plan of a program of one device that takes the place of the first one, once its kernels are measured:
    what needs no more than eager, or, for the smallest budget, less; None where the first one stays."""
    if not options.has_budget:
        return _as_small_as_eager(options, runner)
    plan, traced = runner.plan, runner.as_traced
    if options.budget != "min" or traced.runs_on or plan.redzone or plan.eviction is None or plan.collectives:
        return None
    found = plan_partly_outside(plan, 0, options)
    if found is None or found.eviction is None:
        return None
    found = replace(found, eviction=replace(found.eviction, budget=found.on_device))
    return outside_as_in(traced, found, gradients=True), found


def _as_small_as_eager(options: RunOptions, runner: Runner) -> tuple[TracedGraph, Plan] | None:
    """Return a plan that needs at most what eager is predicted to need on its device, for a program without a budget
    that needs more; None if it needs no more, or if no such plan is found."""
    traced, known = runner.as_traced, measured(runner, None)
    saved = not (options.cuda_graph or options.sanitize)  # no sanitizer sees what each call allocates
    found = no_more_than_eager(runner.plan, traced.graph, known.transient, options, saved=saved)
    return None if found is None else (outside_as_in(traced, found, gradients=True), found)


def adopt_need(runner: Runner) -> None:
    """Raise the recorded budget of a program to what it needs, for a budget that stands for that need ("min")."""
    kept = runner.plan.eviction
    if kept is not None and kept.budget is not None and excess(runner) > 0:
        runner.plan = replace(runner.plan, eviction=replace(kept, budget=on_device(runner)))


def on_device(runner: Runner) -> int:
    """Return the bytes on the device at the peak, with all of the arena that the program runs in."""
    return with_arena(runner.plan, runner.arena.nbytes)


def measured(runner: Runner, before: Measured | None) -> Measured:
    """Return the most that each traced op allocated in all trial runs so far."""
    plan, traced = runner.plan, runner.as_traced
    if plan.eviction is None:
        return Measured(traced=traced, plan=plan, transient=plan.transient)
    found = [0] * len(traced.graph.ops) if before is None else list(before.transient)
    for source, nbytes in zip(plan.eviction.sources, plan.transient, strict=True):
        if source >= 0:
            found[source] = max(found[source], nbytes)
    return Measured(traced=traced, plan=plan, transient=tuple(found))


def infeasible(plan: Plan) -> BudgetInfeasible:
    """Return the error of a plan that keeps its budget in prediction, and not with the measured temporaries."""
    most = max(range(len(plan.graph.ops)), key=lambda op: plan.transient[op])
    op = plan.graph.ops[most]
    assert plan.eviction is not None
    limits = [s.budget for s in plan.devices if s.budget is not None] or [plan.eviction.budget or 0]
    need = plan.on_device
    return BudgetInfeasible(
        f"the step needs {format_bytes(need)}, its budget is {format_bytes(min(limits))}: while {op.name} ({op.target})"
        f" runs, its kernel allocates {format_bytes(plan.transient[most])} beside the arena",
        op=op.name,
        smallest=need,
        where="budget",
        hint=f"give at least {need} bytes ({format_bytes(need)})",
    )
