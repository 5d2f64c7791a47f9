"""`made_room`: frees the arena of the programs of a step, for smaller ones, while an optimizer runs beside it."""

from __future__ import annotations

from collections.abc import Sequence

from memplan.core.plan import Plan
from memplan.planning.caller_side import plan_with_caller
from memplan.planning.room_together import RunningGraph, Timeline, need_in_arena, room_together
from memplan.runtime.execute.instances import ProgramInstance
from memplan.runtime.measured_budget import Built, plan_as_small_as_eager
from memplan.runtime.memory.joint_placement import completed_events
from memplan.runtime.memory.shared_arena import ArenaCoordinator, release_arenas
from memplan.runtime.options import RunOptions
from memplan.trace.graph.remap_to_plan import outside_as_in
from memplan.trace.optimizer.first_update import FirstUpdate
from memplan.trace.traced import TracedGraph

Smaller = tuple[TracedGraph, Plan]


def made_room(
    coordinator: ArenaCoordinator, options: RunOptions, update: FirstUpdate
) -> Sequence[tuple[ProgramInstance, Smaller]]:
    """Free the arena of the last step if it and an update need more than eager; return what is to be made smaller.

    That is each instance that ran, and the step and the plan of the program that takes its place. There are none, and
    nothing changes, while a call waits for its backward, or where something else than the `.grad` of a parameter refers
    to a gradient in the arena.
    """
    with coordinator.calling:
        events = coordinator.step_so_far
        instances = list(
            {id(e.instance): e.instance for e in events if isinstance(e.instance, ProgramInstance)}.values()
        )
        free = not coordinator.waiting and all(left.are_unshared for left in coordinator.left)
        if not free or not any(e.backward for e in events):
            return ()
        position = {id(one): i for i, one in enumerate(instances)}
        timeline = tuple(dict.fromkeys((position[id(e.instance)], e.backward) for e in completed_events(events)))
        least = coordinator.needed_by_others(instances)
        found = _smaller(instances, timeline, options, update.nbytes, least)
        if found is None or not release_arenas(instances):
            return ()
        coordinator.forget_step(max(plan.arena_size for _, plan in found))
        for one, (_, plan) in zip(instances, found, strict=True):
            update.report(one.plan, plan, one.runner.caller_side.loss)
        return tuple(zip(instances, found, strict=True))


def _smaller(
    instances: Sequence[ProgramInstance], timeline: Timeline, options: RunOptions, after: int, least: int
) -> Sequence[Smaller] | None:
    """Return what each instance is to run by, so that all of a step and an update need no more than eager.

    None where they do not need more. `least`: as in `room_together`.
    """
    first = instances[0]
    if len(instances) == 1 and first.runner.plan.arena_size == first.plan.arena_size:
        built, side = Built(traced=first.runner.as_traced, runner=first.runner), first.runner.caller_side
        alone = plan_as_small_as_eager(options, built, after=after, caller=side)
        plans = (first.plan, first.plan if alone is None else alone[1])
        before, now = (need_in_arena(plan_with_caller(plan, side), after, least) for plan in plans)
        return None if alone is None or (least and now >= before) else [alone]
    steps = [one.runner.as_traced for one in instances]
    numbers = {id(step): i for i, step in enumerate(steps)}  # instances of one program are of one trace
    graphs = [
        RunningGraph(traced=step.graph, plan=one.plan, program=numbers[id(step)], caller=one.runner.caller_side)
        for step, one in zip(steps, instances, strict=True)
    ]
    made = room_together(graphs, timeline, after, options, least=least)
    if made is None:
        return None
    return [(outside_as_in(step, plan, gradients=True), plan) for step, plan in zip(steps, made, strict=True)]
