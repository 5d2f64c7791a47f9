"""Explains one step of a plan: which buffers are alive, why, and what would save memory there.

Advice is derived from the plan's own data, and nothing is estimated. A lever names buffers of the plan, and `saves` is
computed from their lifetimes: the bytes by which max live (or the arena) would fall if nothing else changed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from memplan.analysis.buffers import Holder, OpAt, alive_at, homes, last_use, next_use, op_at, own_touches, touches
from memplan.analysis.rows import Group, grouped
from memplan.core.arguments import LOAD, require_kind
from memplan.core.evictions import OFFLOAD_WAIT
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.core.problem import Interval, Problem
from memplan.core.units import format_bytes
from memplan.errors import InvalidSize

SHOWN = 3
LEAST = 0.01  # share of the live bytes: what saves less is no advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One way to make a plan smaller; `text` says which, for people, and `saves` the most bytes that it can save."""

    saves: int
    text: str


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
    require_kind(plan, Plan, "explain", LOAD)
    step = plan.problem.peak_step if at is None else at
    count = len(plan.schedule.order)
    if not isinstance(step, int) or not 0 <= step < count:
        last = f"its steps are 0 to {count - 1}" if count else "it has no steps"
        raise InvalidSize(f"{plan.model or 'the plan'} has no step {step!r}", hint=last)
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


# -- what would save memory ----------------------------------------------------------------------------------


def levers(plan: Plan, step: int | None = None) -> tuple[Lever, ...]:
    """Return what would make `plan` smaller at `step` (None: the peak), if it saves at least `LEAST`.

    That is to evict the activations that are saved for the backward and idle at the step.
    """
    if not plan.problem.buffers or not plan.schedule.order:
        return ()
    at = plan.problem.peak_step if step is None else step
    alive = alive_at(plan, at)
    found = list(_saved_for_backward(plan, at, {holder.id: holder for holder in alive}))
    gaps = {buffer: (gap,) for _, buffer, gap in found if len(gap)}
    without = Problem(buffers=tuple(replace(b, gaps=gaps.get(b.id, b.gaps)) for b in plan.problem.buffers))
    saves = plan.max_live - without.max_live
    if not found or saves < LEAST * sum(holder.size for holder in alive):
        return ()
    idle = grouped(holder for holder, _, _ in found)
    rows = [f"{format_bytes(g.bytes)} of {_made_by(g.op, g.module)}" for g in idle[:SHOWN]]
    rows += [f"and {len(idle) - SHOWN} more rows"] if len(idle) > SHOWN else []
    lower = f"saves at most {format_bytes(saves)} of the peak"
    effect = lower if saves else "does not lower the peak: it lies elsewhere"
    what = f"{format_bytes(sum(g.bytes for g in idle))} of activations wait for the backward ({', '.join(rows)})"
    how = f"recomputing or offloading them{' too' if plan.evictions else ''} {effect}"
    return (Lever(saves=saves, text=f"{what}: {how}"),)


def _saved_for_backward(plan: Plan, step: int, alive: Mapping[str, Holder]) -> Iterator[tuple[Holder, str, Interval]]:
    """Yield (saved activation, the buffer that holds it, the idle steps).

    Storages that the plan already recomputes or offloads are left out, and so are those that are being offloaded.
    """
    backward = [plan.graph.ops[i].phase is Phase.BACKWARD for i in plan.schedule.order]
    steps, buffers = own_touches(plan), homes(plan)
    evicted = {plan.graph.storages[s].name for _, s in plan.eviction.instances} if plan.eviction else set()
    for storage in plan.graph.storages:
        buffer, used = buffers.get(storage.name, ""), steps.get(storage.name, ())
        before, after = last_use(used, step), next_use(used, step)
        if buffer not in alive or before is None or after is None or step in used or storage.name in evicted:
            continue
        if backward[before] or not backward[after] or _target(plan, after) == OFFLOAD_WAIT:
            continue
        at, op = storage.origin, _target(plan, used[0])
        holder = replace(alive[buffer], id=storage.name, op=op, module=at.module, source=at.source)
        yield holder, buffer, Interval(before + 1, after)


def _target(plan: Plan, step: int) -> str:
    return plan.graph.ops[plan.schedule.order[step]].target


def _made_by(op: str, module: str) -> str:
    name = op.removesuffix(".default") or "unknown op"
    return f"{name} in {module}" if module else name
