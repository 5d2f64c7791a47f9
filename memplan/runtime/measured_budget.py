"""Holds programs against their budgets once the trial run has measured what kernels allocate by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.planning.fit import plan_again
from memplan.planning.measured import no_more_than_eager
from memplan.planning.outside_arena import plan_partly_outside
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import CompileOptions, RunOptions
from memplan.trace.graph.remap_to_plan import outside_as_in
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall

_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A program, and the variant of the step, as it was traced, that its plan is for."""

    traced: TracedGraph
    runner: Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of a trial run: `transient` are the bytes that each op of `traced` allocates outside the arena while
    it, or an op that computes it again, runs; `plan` is the plan that was tried."""

    traced: TracedGraph
    plan: Plan
    transient: tuple[int, ...]


def build_measured(
    build: Callable[[Sequence[Measured | None]], Sequence[Built]],
    count: int,
    *,
    again: bool = True,
    alone: bool = False,
) -> Sequence[Built]:
    """Return `count` programs whose totals, measured temporaries included, keep their budgets.

    `build` plans and assembles the programs; it takes what is measured of each (None: nothing yet). It is called again
    with what is known then while a program exceeds its budget, unless `again` is False, because plans are given.
    `alone`: no other programs run in their arena, which is freed before that. Raises `BudgetInfeasible` where no plan
    keeps the budgets.
    """
    over: list[Plan] = []

    def less(made: Sequence[Built], known: Sequence[Measured | None]) -> Sequence[Measured | None] | None:
        over[:] = [one.runner.plan for one in made if excess(one.runner) > 0]
        if not over:
            return None
        now = [measured(one, before) for one, before in zip(made, known, strict=True)]
        if alone:
            discard(made)
        return now

    first: Sequence[Measured | None] = [None] * count
    made, kept = plan_again(build, less, first, tries=_TRIES if again else 1)
    if not kept:
        raise _infeasible(over[0])
    return made


def first_program(
    options: RunOptions,
    traced: TracedGraph,
    retracer: CapturedCall | None,
    assemble: Callable[[TracedGraph, Plan], Runner],
    *,
    given: Plan | None = None,
    room: int | None = None,
) -> Built:
    """Return the program of a step, with the `given` plan or one that is made anew with what its trial run measures.

    `assemble` returns the program of a variant of the step and its plan, in the arena. `room`: the bytes of the arena
    if it has other programs; else None. A step that fits in an arena that is there is not compared with eager.

    Raises `BudgetInfeasible` where no plan keeps the budgets.
    """
    first = room is None

    def build(known: Sequence[Measured | None]) -> Sequence[Built]:
        """Return the program, planned with what is measured of it."""
        if known[0] is None:
            settled, plan = options.settle(traced, retracer, given, room=room or 0)
        else:
            settled, plan = replan(options, known[0], room=room or 0)
        with timed(f"making the program of {plan.model}, and running it once"):
            runner = assemble(settled, plan)
        if options.budget == "min" or (room and not options.budget_is_absolute):
            adopt_need(runner)
        return (Built(traced=settled, runner=runner),)

    built = build_measured(build, 1, again=given is None, alone=first)[0]
    outgrown = room is not None and not options.has_budget and built.runner.plan.arena_size > room
    if given is not None or not (first or outgrown) or len(traced.runs_on) > 1:
        return built
    smaller = smaller_plan(options, built)
    if smaller is None or (room and _with_arena(smaller[1], room) >= _with_arena(built.runner.plan, room)):
        return built
    before, needed = (built.traced, built.runner.plan), _on_device(built.runner)
    discard([built])
    del built
    traced, runner = smaller[0], assemble(*smaller)
    if options.budget == "min" and _on_device(runner) > needed:  # its kernels take more than those of the first one
        discard([Built(traced=traced, runner=runner)])
        traced, runner = before[0], assemble(*before)
    if options.budget == "min":
        adopt_need(runner)
    return Built(traced=traced, runner=runner)


def _with_arena(plan: Plan, room: int) -> int:
    """Return the bytes on the device at the peak of a plan in an arena that has at least `room` bytes."""
    return plan.on_device + max(room - plan.arena_size, 0)


def discard(made: Sequence[Built]) -> None:
    """Free the arena of programs that nobody will run, although there may still be references to them."""
    for one in made:
        one.runner.arena.release()


def excess(runner: Runner) -> int:
    """Return the bytes by which a program exceeds its budget in the arena that it runs in; at most 0 if it keeps it."""
    plan = runner.plan
    kept = plan.eviction
    if kept is None or plan.redzone:
        return 0
    if plan.devices:
        totals = [(plan.on_section(section), section.budget) for section in plan.devices]
        return max((total - limit for total, limit in totals if limit is not None), default=0)
    return 0 if kept.budget is None else _on_device(runner) - kept.budget


def replan(options: RunOptions, known: Measured, *, room: int = 0) -> tuple[TracedGraph, Plan]:
    """Return a step that was tried, with a plan that keeps its budgets with what its kernels were seen to allocate.

    `room`: the bytes of an arena that exists already.
    """
    return options.again(known.plan).settle(known.traced, None, room=room, transient=known.transient)


def smaller_plan(options: RunOptions, built: Built) -> tuple[TracedGraph, Plan] | None:
    """Return the plan of a program of one device that takes the place of the first one, once its kernels are measured:
    what needs no more than eager, or, for the smallest budget, less; None where the first one stays."""
    if not options.has_budget:
        return _as_small_as_eager(options, built)
    plan, traced = built.runner.plan, built.traced
    if options.budget != "min" or traced.runs_on or plan.redzone or plan.eviction is None or plan.collectives:
        return None
    found = plan_partly_outside(plan, 0, options)
    if found is None or found.eviction is None:
        return None
    found = replace(found, eviction=replace(found.eviction, budget=found.on_device))
    return outside_as_in(traced, found, gradients=True), found


def _as_small_as_eager(options: RunOptions, built: Built) -> tuple[TracedGraph, Plan] | None:
    """Return a plan that needs at most what eager is predicted to need on its device, for a program without a budget
    that needs more; None if it needs no more, or if no such plan is found."""
    traced, known = built.traced, measured(built, None)
    saved = not (options.cuda_graph or options.sanitize)  # no sanitizer sees what each call allocates
    found = no_more_than_eager(built.runner.plan, traced.graph, known.transient, options, saved=saved)
    return None if found is None else (outside_as_in(traced, found, gradients=True), found)


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


def adopt_need(runner: Runner) -> None:
    """Raise the recorded budget of a program to what it needs, for a budget that stands for that need ("min")."""
    kept = runner.plan.eviction
    if kept is not None and kept.budget is not None and excess(runner) > 0:
        runner.plan = replace(runner.plan, eviction=replace(kept, budget=_on_device(runner)))


def _on_device(runner: Runner) -> int:
    """Return the bytes on the device at the peak, with all of the arena that the program runs in."""
    return _with_arena(runner.plan, runner.arena.nbytes)


def measured(built: Built, before: Measured | None) -> Measured:
    """Return the most that each traced op allocated in all trial runs so far."""
    plan = built.runner.plan
    if plan.eviction is None:
        return Measured(traced=built.traced, plan=plan, transient=plan.transient)
    found = [0] * len(built.traced.graph.ops) if before is None else list(before.transient)
    for source, nbytes in zip(plan.eviction.sources, plan.transient, strict=True):
        if source >= 0:
            found[source] = max(found[source], nbytes)
    return Measured(traced=built.traced, plan=plan, transient=tuple(found))


def _infeasible(plan: Plan) -> BudgetInfeasible:
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
