"""`made_room`: frees the arena of the programs of a step, for smaller ones, while an optimizer runs beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from memplan.core.plan import Plan
from memplan.errors import MemplanError
from memplan.planning.caller_side import plan_with_caller
from memplan.planning.outside_arena import left_by
from memplan.planning.room_together import RunningGraph, StepTogether, Timeline, need_in_arena
from memplan.runtime.execute.arena_gradients import GradientsInUse
from memplan.runtime.execute.instances import ProgramInstance, Smaller
from memplan.runtime.measured_budget import Built, outside_of_arena, plan_as_small_as_eager, unevicted
from memplan.runtime.memory.joint_placement import InstanceEvent, completed_events, joint_plans
from memplan.runtime.memory.shared_arena import ArenaCoordinator, release_arenas
from memplan.runtime.options import RunOptions
from memplan.trace.graph.remap_to_plan import outside_as_in
from memplan.trace.optimizer.first_update import FirstUpdate

_log = logging.getLogger("memplan")
_MOST_OPS = 4096  # of several calls together; comparing that many takes about 10 seconds


def compared(model: str, compare: Callable[[], bool]) -> bool:
    """Return what a comparison with eager returns; False where it cannot be made, as it must not end a training.

    `model`: the name for the log, which says what nobody expects to go wrong.
    """
    try:
        return compare()
    except (MemplanError, GradientsInUse, torch.OutOfMemoryError):
        return False
    except Exception as error:
        what = "%s: its memory could not be compared with eager's, and stays as it is: %s: %s"
        _log.warning(what, model, type(error).__name__, error)
        return False


def made_room(
    coordinator: ArenaCoordinator, options: RunOptions, update: FirstUpdate
) -> Sequence[ProgramInstance] | None:
    """Free the arena of the last step if it and an update need more than eager; return what is to be made smaller.

    That is each instance that ran: its `smaller` is set. Where an arena is too much, or what the update allocates is
    not known, they have none. None if the programs stay: while a call waits for its backward, or where something else
    than the `.grad` of a parameter refers to a gradient in the arena.
    """
    with coordinator.calling:
        events = coordinator.step_so_far
        instances = list(
            {id(e.instance): e.instance for e in events if isinstance(e.instance, ProgramInstance)}.values()
        )
        free = not coordinator.waiting and all(left.are_unshared for left in coordinator.left)
        ops = sum(len(one.plan.graph.ops) for one in instances)
        if not free or not any(e.backward for e in events):
            return None
        sides = tuple(one.runner.caller_side for one in instances)
        if not coordinator.is_new_question((update.nbytes, update.is_unknown, sides)):
            return None
        if len(instances) > 1 and ops > _MOST_OPS:
            return None
        position = {id(one): i for i, one in enumerate(instances)}
        timeline = tuple(dict.fromkeys((position[id(e.instance)], e.backward) for e in events))
        step = _together(instances, timeline, options, update.nbytes)
        found = _alone(instances[0], options, step) if len(instances) == 1 else _smaller(instances, step)
        plans = [one.plan for one in instances] if found is None else [plan for _, plan in found]
        if update.is_unknown or step.is_more_than_eager(plans):
            least = step.without_arena(None if update.is_unknown else plans)
            found = found if least is None else _with_plans(instances, least)
            plans = [one.plan for one in instances] if found is None else [plan for _, plan in found]
        reserved = 0 if found is not None else _reserved_for_dropped(instances, events)
        if (step.least or reserved) and step.is_more_than_eager(plans, reserved):
            instances, found = _without_arenas(coordinator, options)
        elif found and not (update.is_unknown or step.is_worth(plans)):
            return None
        if not found or not release_arenas(instances):
            return None
        coordinator.forget_step(max(plan.arena_size for _, plan in found), instances)
        made = [(one, new) for one, new in zip(instances, found, strict=True) if _is_smaller(new[1], one.plan)]
        for one in instances:
            one.slot = None
        for one, smaller in made:
            update.report(one.plan, smaller[1], one.runner.caller_side.loss)
            one.smaller = smaller
        return [one for one, _ in made]


def _is_smaller(plan: Plan, than: Plan) -> bool:
    """Return whether a program by a plan takes fewer bytes of an arena, so that it is made."""
    return plan.arena_size < than.arena_size or (than.arena_size > 0 and bool(left_by(than, plan)))


def _reserved_for_dropped(instances: Sequence[ProgramInstance], events: Sequence[InstanceEvent]) -> int:
    """Return the bytes of the arena of a step in which results of calls were dropped before their backward; else 0.

    Their backward may come in a later step of the same order, and has its place.
    """
    completed = completed_events(events)
    return joint_plans(instances, completed)[0].arena_size if len(completed) > len(events) else 0


def _without_arenas(coordinator: ArenaCoordinator, options: RunOptions) -> tuple[list[ProgramInstance], list[Smaller]]:
    """Return all instances of a coordinator that can do with a smaller arena, or none, and what they become."""
    found: list[tuple[ProgramInstance, Smaller]] = []
    for one in tuple(coordinator.members):
        if isinstance(one, ProgramInstance) and one.plan.arena_size:
            smaller = outside_of_arena(options, Built(traced=one.runner.as_traced, runner=one.runner))
            if smaller[1].arena_size < one.plan.arena_size:
                found.append((one, smaller))
    return [one for one, _ in found], [smaller for _, smaller in found]


def _together(
    instances: Sequence[ProgramInstance], timeline: Timeline, options: RunOptions, after: int
) -> StepTogether:
    """Return the step in which the instances ran, and what is known of its memory."""
    steps = [one.runner.as_traced for one in instances]
    numbers = {id(step): i for i, step in enumerate(steps)}  # instances of one program are of one trace
    graphs = [
        RunningGraph(
            traced=step.graph,
            plan=one.plan,
            unevicted=unevicted(options, Built(traced=step, runner=one.runner)),
            program=numbers[id(step)],
            caller=one.runner.caller_side,
            shared=one.runner.shared_with(one.ownership.taken, one.ownership.returned),
        )
        for step, one in zip(steps, instances, strict=True)
    ]
    coordinator = instances[0].ownership.coordinator
    return StepTogether(
        graphs=graphs,
        timeline=timeline,
        options=options,
        after=after,
        least=coordinator.needed_by_others(instances),
    )


def _alone(one: ProgramInstance, options: RunOptions, step: StepTogether) -> Sequence[Smaller] | None:
    """Return what the only instance of a step is to run by, as `_smaller` does."""
    if one.runner.plan.arena_size != one.plan.arena_size:  # it is elsewhere than alone
        return _smaller([one], step)
    built, side = Built(traced=one.runner.as_traced, runner=one.runner), one.runner.caller_side
    alone = plan_as_small_as_eager(options, built, after=step.after, caller=side)
    plans = (one.plan, one.plan if alone is None else alone[1])
    before, now = (need_in_arena(plan_with_caller(plan, side), step.after, step.least) for plan in plans)
    return None if alone is None or (step.least and now >= before) else [alone]


def _smaller(instances: Sequence[ProgramInstance], step: StepTogether) -> Sequence[Smaller] | None:
    """Return what each instance is to run by, so that all of a step and an update need no more than eager.

    None where they do not need more.
    """
    made = step.smaller()
    return None if made is None else _with_plans(instances, made)


def _with_plans(instances: Sequence[ProgramInstance], made: Sequence[Plan]) -> Sequence[Smaller]:
    """Return what each instance is to run by, with these plans."""
    steps = [one.runner.as_traced for one in instances]
    return [(outside_as_in(step, plan, gradients=True), plan) for step, plan in zip(steps, made, strict=True)]
