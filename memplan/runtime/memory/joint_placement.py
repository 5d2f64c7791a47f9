"""Plans one arena for all instances of a training step, in the order in which their forwards and backwards came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import solve

if TYPE_CHECKING:
    from memplan.runtime.memory.arena_parts import ArenaUser


@dataclass(frozen=True, eq=False, slots=True)
class InstanceEvent:
    """A forward (or backward) of an instance, and the other instances (by id) that were in flight then."""

    instance: ArenaUser
    backward: bool
    in_flight: frozenset[int]


def completed_events(events: Sequence[InstanceEvent]) -> list[InstanceEvent]:
    """Return the events with the backwards that did not come, of an infinite loss or because results were dropped.

    Each is put after the last event at which its instance was in flight, those of one event in the reverse order of
    their forwards. A later step in which it comes at another time is of another order.
    """
    ends_with_backward = {id(e.instance): e.backward for e in events}
    came = {one for one, backward in ends_with_backward.items() if backward}
    missing = dict.fromkeys(e.instance for e in events if id(e.instance) not in came and _has_backward(e.instance))
    last = {one: max(i for i, e in enumerate(events) if e.instance is one or id(one) in e.in_flight) for one in missing}
    found: list[InstanceEvent] = []
    for i, event in enumerate(events):
        found.append(event)
        waiting = event.in_flight if event.backward else event.in_flight | {id(event.instance)}
        for one in reversed([one for one in missing if last[one] == i]):
            waiting -= {id(one)}
            found.append(InstanceEvent(one, True, waiting))
    return found


def _has_backward(instance: ArenaUser) -> bool:
    return len(instance.plan.graph.ops) > instance.plan.graph.forward_ops


def joint_plans(instances: Sequence[ArenaUser], events: Sequence[InstanceEvent]) -> list[Plan]:
    """Return a plan for each instance, with offsets at which all of them can be in flight as in these events.

    The buffers of an instance that ran several times are alive from the first time to the last.
    """
    first: dict[tuple[int, bool], int] = {}
    last: dict[tuple[int, bool], int] = {}
    end = 0
    for event in events:
        key = id(event.instance), event.backward
        first.setdefault(key, end)
        last[key] = end
        forward = event.instance.plan.graph.forward_ops
        end += len(event.instance.plan.graph.ops) - forward if event.backward else forward
    buffers = [b for i, instance in enumerate(instances) for b in _shifted(instance, i, first, last)]
    solution = solve(Problem(buffers=tuple(buffers)))
    plans = []
    for i, instance in enumerate(instances):
        offsets = {b.id: solution.offsets[_name(i, b)] for b in instance.plan.problem.buffers}
        placed = replace(instance.plan.solution, offsets=offsets, arena_size=solution.arena_size)
        plans.append(replace(instance.plan, solution=placed))
    return plans


def _shifted(
    instance: ArenaUser, number: int, first: dict[tuple[int, bool], int], last: dict[tuple[int, bool], int]
) -> list[Buffer]:
    """Return the buffers of an instance, with live intervals in steps of the whole training step."""
    split, forward, backward = instance.plan.graph.forward_ops, (id(instance), False), (id(instance), True)

    def at(step: int, starts: dict[tuple[int, bool], int], *, late: bool) -> int:
        if late:  # without a backward, nothing is alive there
            return starts.get(backward, 0) + step - split
        return starts.get(forward, 0) + step

    moved = [
        (
            b,
            Interval(
                at(b.live.start, first, late=b.live.start >= split), at(b.live.end, last, late=b.live.end > split)
            ),
        )
        for b in instance.plan.problem.buffers
    ]
    return [replace(b, id=_name(number, b), live=live, gaps=()) for b, live in moved if not live.is_empty]


def _name(number: int, buffer: Buffer) -> str:
    return f"{number}.{buffer.id}"
