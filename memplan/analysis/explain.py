"""Explains one step of a plan: which buffers are alive, why, and what would save memory there."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memplan.analysis.advice import Lever, levers
from memplan.analysis.buffers import Holder, OpAt, alive_at, last_use, next_use, op_at, touches
from memplan.analysis.rows import Group, grouped
from memplan.core.plan import Plan
from memplan.errors import InvalidSize


class BufferRole(enum.StrEnum):
    """The role of a live buffer at a step."""

    MADE = "made here"
    USED = "used here"
    LAST_USE = "used here for the last time"
    WAITS = "waits"
    KEPT = "kept to the end for the caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBuffer:
    """A buffer that is alive at the step.

    `next_use` is the next op that touches it, `holds_until` the last one (None: no later op does, the caller keeps it).
    `idle` is the number of steps around this one in which nothing touches it.
    """

    holder: Holder
    role: BufferRole
    next_use: OpAt | None
    holds_until: OpAt | None
    idle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One step of a plan: `live` bytes are alive there, `max_live` at the peak; `held` has the largest buffer first."""

    model: str
    at: OpAt
    live: int
    max_live: int
    arena_size: int
    held: tuple[HeldBuffer, ...]
    groups: tuple[Group, ...]
    levers: tuple[Lever, ...]


def explain(plan: Plan, at: int | None = None) -> Explanation:
    """Explain which buffers are alive at a step of a plan, why, and what would save memory there.

    Args:
        plan: The plan.
        at: A step of its schedule, from 0; None for the first step at the peak.

    Returns:
        The live buffers, largest first, with the op that needs each of them next and the ways to save memory. Sizes
        are bytes. It takes milliseconds on thousands of ops.

    Raises:
        InvalidSize: The plan has no such step.

    Example:
        >>> for held in memplan.explain(plan).held[:3]:
        ...     print(held.holder.size, held.holder.module, held.role)
    """
    step = plan.problem.peak_step if at is None else at
    count = len(plan.schedule.order)
    if not 0 <= step < count:
        last = f"its steps are 0 to {count - 1}" if count else "it has no steps"
        raise InvalidSize(f"{plan.model or 'the plan'} has no step {step}", hint=last)
    steps, holders = touches(plan), alive_at(plan, step)
    return Explanation(
        model=plan.model,
        at=op_at(plan, step),
        live=sum(h.size for h in holders),
        max_live=plan.max_live,
        arena_size=plan.arena_size,
        held=tuple(_held(plan, holder, steps.get(holder.id, ()), step) for holder in holders),
        groups=grouped(holders),
        levers=levers(plan, step),
    )


def _held(plan: Plan, holder: Holder, steps: tuple[int, ...], step: int) -> HeldBuffer:
    after, before = next_use(steps, step), last_use(steps, step)
    if step not in steps:
        role, idle = BufferRole.WAITS if after is not None else BufferRole.KEPT, _or(after, holder.end)
        idle -= _or(before, holder.start) + 1
    else:
        used = BufferRole.USED if after is not None else BufferRole.LAST_USE
        role, idle = BufferRole.MADE if before is None else used, 0
    until = (None, None) if after is None else (op_at(plan, after), op_at(plan, steps[-1]))
    return HeldBuffer(holder=holder, role=role, next_use=until[0], holds_until=until[1], idle=idle)


def _or(step: int | None, other: int) -> int:
    return other if step is None else step
