"""Builds programs: plans what was traced, tries it, and plans again with what its kernels allocate, in one arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from memplan.core.host_limit import host_memory
from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.core.units import format_bytes
from memplan.devices.host_memory import in_files, pin
from memplan.devices.kinds import is_accelerator
from memplan.errors import BudgetInfeasible
from memplan.planning.fit import plan_again
from memplan.planning.measured import left_outside
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
from memplan.trace.traced import Source, TracedGraph

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

    def program(
        self,
        traced: TracedGraph,
        captured: CapturedCall | None,
        given: Plan | None = None,
        *,
        others: Sequence[Plan] = (),
        keep_example: bool = False,
    ) -> tuple[Runner, ProfileGuide | None]:
        """Return a program for a step, with the `given` plan or one that is made with what its trial run measures.

        A guide measures a program whose plan evicts something, if steps are measured. `captured`: traces other variants
        of the step. `others`: plans that run in the arena too. `keep_example`: the program keeps the tensors of the
        example, on which another plan may be tried.

        Raises `BudgetInfeasible` where no plan keeps the budgets.
        """
        measures = self.options.measures
        costs = None if measures else self.options.costs  # guides decide again, with those of the first steps
        options = replace(self.options, costs=costs)
        room = 0 if self.arena is None else self.arena.nbytes
        planned: list[_Planned] = []
        over: list[Plan] = []

        def build(asked: RunOptions, known: Measured | None) -> Runner:
            """Return the program, planned with what is measured of it."""
            if others:
                self._free_made()  # of the program that was tried before
            found = asked.replan(known, room) if known else asked.settle(traced, captured, given, room=room)
            planned[:] = [found]
            return self._placed(found, others, room)

        def less(made: Runner, known: Measured | None) -> Measured | None:
            if excess(made) <= 0:
                return None
            over[:] = [made.plan]
            now = measured(made, known)
            if not room:  # no other programs run in their arena
                discard(made)
            return now

        def again(asked: RunOptions, known: Measured | None) -> tuple[Runner, bool]:
            """Return the program by some options, and whether it keeps the budgets."""
            return plan_again(partial(build, asked), less, known, tries=1 if given is not None else _TRIES)

        self._made = []
        try:
            made, kept = again(options, None)
            if not kept:
                raise infeasible(over[0])
            if given is None and not measures and _depends_on_costs(options, made):
                made = self._by_measured_costs(made, options, again, before=planned[0], others=others, room=room)
            outgrown = not options.has_budget and made.plan.arena_size > room
            if given is None and not measures and len(traced.runs_on) < 2 and (not room or outgrown):
                made = self._smaller(made, planned[0], others, room)
        except BaseException:
            self._free_made()  # what was built may be kept alive by the error's traceback
            raise
        finally:
            self._made = None
        evicts = measures and bool(made.plan.evictions)
        guide = ProfileGuide(options, made, partial(self.assemble, made.as_traced)) if evicts else None
        if not keep_example:
            made.forget_example()
        return made, guide

    def assemble(
        self, traced: TracedGraph, plan: Plan, room: int = 0, bound: tuple[BoundOp, ...] | None = None
    ) -> Runner:
        """Return the program of a plan. `room`: the least size of the arena in bytes; `bound`: as in `Runner`."""
        if traced.runs_on:
            self._prepare_host(traced, plan)
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

    def _prepare_host(self, traced: TracedGraph, plan: Plan) -> None:
        """Require room for what a step needs on the host, and lock what it copies from there; its tensors stay the same
        objects. What lies in a file stays there, and needs none, unless the step writes it."""
        tensors, graph = self.guards.tensors(), traced.graph
        mapped, written, only_read = in_files(tensors), set[int](), 0
        for b in traced.bindings if mapped else ():
            if b.source in (Source.PARAMETER, Source.BUFFER, Source.STATE):
                holder, key = self.guards.slot(b)
                address = holder[key].untyped_storage().data_ptr()
                if b.written:
                    written.add(address)
                elif mapped.get(address) is False:
                    only_read += graph.storages[graph.values[b.value].storage].nbytes
        require_host_memory(plan, only_read)
        if is_accelerator(traced.device):
            pin(tensors, traced.device, {at for at, shared in mapped.items() if shared or at not in written})

    def free_arena(self) -> None:
        """Free the arena before all programs are made again. Raises `ArenaInUse` if a step is in flight."""
        if self.arena is not None:
            with self.arena.ownership as ownership:
                ownership.require_free("another program")
                self.arena.empty()

    def _free_made(self) -> None:
        for arena in self._made or ():
            arena.empty()

    def _smaller(self, made: Runner, planned: _Planned, others: Sequence[Plan], room: int) -> Runner:
        """Return the program, or in its place one that needs no more than eager (less, for the smallest budget)."""
        smaller = smaller_plan(self.options, made)
        if smaller is None or (room and with_arena(smaller[1], room) >= with_arena(made.plan, room)):
            return made
        needed = on_device(made)
        discard(made)
        del made
        found = self._placed(smaller, others, room)
        if self.options.budget == "min" and on_device(found) > needed:  # its kernels take more than those of
            discard(found)  # the first one
            found = self._placed(planned, others, room)
        return found

    def _by_measured_costs(
        self,
        made: Runner,
        options: RunOptions,
        again: Callable[[RunOptions, Measured | None], tuple[Runner, bool]],
        *,
        before: _Planned,
        others: Sequence[Plan],
        room: int,
    ) -> Runner:
        """Return the program whose evictions are decided by what ops and copies are measured to take; that which was
        decided by the costs of the kind of device, if none keeps the budget."""
        known = measured(made, None)
        if not room:  # as between the tries of `program`; ops are measured in memory of their own
            discard(made)
        with timed(f"measuring the ops and copies of {made.plan.model}"):
            options = replace(options, costs=measured_costs(made))
        del made
        try:
            found, kept = again(options, known)
        except BudgetInfeasible:
            kept = False
        return found if kept else self._placed(before, others, room)

    def _placed(self, planned: _Planned, others: Sequence[Plan], room: int) -> Runner:
        """Return the program of a plan, in an arena that has room for it and for others."""
        made = self.assemble(*planned)
        for plan in others:
            made.arena.fit(plan)
        if self.options.budget == "min" or (room and not others and not self.options.budget_is_absolute):
            adopt_need(made)
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


def _depends_on_costs(options: RunOptions, made: Runner) -> bool:
    """Return whether costs that nobody gave decide what is evicted, on an accelerator, where ops can be timed in some
    milliseconds: ranks have one plan, and cannot have each their own costs."""
    plan = made.plan
    one_device = is_accelerator(made.traced.device) and not (plan.devices or plan.collectives)
    return one_device and options.costs is None and bool(plan.evictions)


def require_host_memory(plan: Plan, in_files: int = 0) -> None:
    """Raise `BudgetInfeasible` if the host has less memory than a step whose model stays there takes of it.

    `in_files`: the bytes of its tensors that are read from files.
    """
    has, needs = host_memory(), plan.on_host - in_files
    if has is not None and needs > has:
        what = (
            f"needs {format_bytes(needs)} of the host's memory beside {format_bytes(plan.on_device)} on the "
            f"device, and the host has {format_bytes(has)}"
        )
        hint = "give host_budget= to keep fewer copies there, a smaller batch, or a machine with more memory"
        raise BudgetInfeasible(what, op="", smallest=needs, where="the host", hint=hint)


def _nothing_beside(options: RunOptions, plan: Plan) -> None:
    """Free nothing: there are no other arenas of the model."""


def with_arena(plan: Plan, room: int) -> int:
    """Return the bytes on the device at the peak of a plan in an arena that has at least `room` bytes."""
    return plan.on_device + max(room - plan.arena_size, 0)


def discard(made: Runner) -> None:
    """Free the arena of a program that nobody will run, although there may still be references to it."""
    made.arena.empty()


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
    what leaves results outside the arena, or, for the smallest budget, needs less; None where the first one stays."""
    if not options.has_budget:
        return _without_budget(options, runner)
    plan, traced = runner.plan, runner.as_traced
    if options.budget != "min" or traced.runs_on or plan.redzone or plan.eviction is None or plan.collectives:
        return None
    found = plan_partly_outside(plan, 0, options)
    if found is None or found.eviction is None:
        return None
    found = replace(found, eviction=replace(found.eviction, budget=found.on_device))
    return outside_as_in(traced, found, gradients=True), found


def _without_budget(options: RunOptions, runner: Runner) -> tuple[TracedGraph, Plan] | None:
    """Return the plan of a program without a budget, with results left outside the arena; None if all stay."""
    traced, known = runner.as_traced, measured(runner, None)
    saved = not (options.cuda_graph or options.sanitize)  # no sanitizer sees what each call allocates
    found = left_outside(runner.plan, traced.graph, known.transient, options, saved=saved)
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
