"""Advice: what would make a plan smaller, derived from its own data, each with the most that it can save.

Nothing is estimated. A lever names buffers of the plan, and `saves` is computed from their lifetimes: the bytes by
which max live (or the arena, or the total) would fall if nothing else changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from memplan.analysis.buffers import Holder, alive_at, homes, last_use, next_use, own_touches
from memplan.analysis.rows import grouped, pattern
from memplan.core.evictions import OFFLOAD_WAIT
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.core.schedule import working_set_bound
from memplan.core.units import format_bytes

SHOWN = 3
LEAST = 0.01  # share of the live bytes: what saves less is no advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One way to make a plan smaller; `text` says which, for people.

    `name` is "evict", "copies", "layout" or "order"; `saves` is the most bytes it can save.
    """

    name: str
    saves: int
    text: str


def levers(plan: Plan, step: int | None = None) -> tuple[Lever, ...]:
    """Return what would make `plan` smaller at `step` (None: the peak), by the bytes that it can save.

    Ways that save less than `LEAST` of the bytes there are left out. The result is empty when nothing is planned.
    """
    if not plan.problem.buffers or not plan.schedule.order:
        return ()
    at = plan.problem.peak_step if step is None else step
    alive = alive_at(plan, at)
    found = [*_copies(plan, at, alive), *_evict(plan, at, alive)]
    if at == plan.problem.peak_step:
        found += [*_layout(plan), *_order(plan)]
    least = LEAST * sum(holder.size for holder in alive)
    return tuple(sorted((one for one in found if one.saves >= least), key=lambda one: -one.saves))


def _evict(plan: Plan, step: int, alive: Iterable[Holder]) -> Iterator[Lever]:
    """Yield the eviction of activations that are saved for the backward and idle at `step`."""
    found = list(_saved_for_backward(plan, step, {holder.id: holder for holder in alive}))
    if not found:
        return
    saves = plan.max_live - _max_live_without(plan, {buffer: gap for _, buffer, gap in found})
    idle = grouped(holder for holder, _, _ in found)
    rows = [f"{_counted(g.count, g.bytes)} of {_made_by(g.op, g.module)}" for g in idle[:SHOWN]]
    rows += [f"and {len(idle) - SHOWN} more rows"] if len(idle) > SHOWN else []
    lower = f"saves at most {format_bytes(saves)} of the peak"
    effect = lower if saves else "does not lower the peak: it lies elsewhere"
    what = f"{format_bytes(sum(g.bytes for g in idle))} of activations wait for the backward ({', '.join(rows)})"
    how = f"recomputing or offloading them{' too' if plan.evictions else ''} {effect}"
    yield Lever(name="evict", saves=saves, text=f"{what}: {how}")


def _saved_for_backward(
    plan: Plan, step: int, alive: Mapping[str, Holder]
) -> Iterator[tuple[Holder, str, tuple[int, int]]]:
    """Yield (saved activation, the buffer that holds it, the idle steps [start, end)).

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
        where = {"module": storage.origin.module, "source": storage.origin.source}
        holder = replace(alive[buffer], id=storage.name, op=_target(plan, used[0]), **where)
        yield holder, buffer, (before + 1, after)


def _target(plan: Plan, step: int) -> str:
    return plan.graph.ops[plan.schedule.order[step]].target


def _max_live_without(plan: Plan, gaps: Mapping[str, tuple[int, int]]) -> int:
    """Return max live if each buffer in `gaps` held no bytes during its steps [start, end)."""
    change = [0] * (len(plan.schedule.order) + 1)
    for buffer in plan.problem.buffers:
        for segment in buffer.segments:
            change[segment.start] += buffer.size
            change[segment.end] -= buffer.size
        start, end = gaps.get(buffer.id, (0, 0))
        change[start] -= buffer.size if end > start else 0
        change[end] += buffer.size if end > start else 0
    return max(accumulate(change))


def _copies(plan: Plan, step: int, alive: Iterable[Holder]) -> Iterator[Lever]:
    """Yield the removal of one of several large buffers of equal size that are alive together."""
    by_size: dict[int, list[Holder]] = {}
    for holder in alive:
        by_size.setdefault(holder.size, []).append(holder)
    several = {size: same for size, same in by_size.items() if len(same) > 1}
    if not several:
        return
    size, same = max(several.items(), key=lambda item: item[0])
    if size * 10 < sum(h.size for h in alive):  # many small ones are no lever
        return
    where = list(dict.fromkeys(_made_by(h.op, pattern(h.module)) for h in same))
    names = ", ".join(where[:SHOWN]) + (f" and {len(where) - SHOWN} more places" if len(where) > SHOWN else "")
    op = plan.graph.ops[plan.schedule.order[step]]
    what = f"{_counted(len(same), size * len(same))} are alive at {_made_by(op.target, op.origin.module)} ({names})"
    yield Lever(name="copies", saves=size, text=f"{what}: each one less can save {format_bytes(size)}")


def _layout(plan: Plan) -> Iterator[Lever]:
    least, how = (plan.max_live, "max live") if plan.solution.claimed else (plan.solution.bound, "the proven bound")
    lost = plan.arena_size - least
    if lost > 0:
        what = f"solver {plan.solution.solver!r} left at most {format_bytes(lost)} above {how}"
        yield Lever(name="layout", saves=lost, text=f"{what}: another solver or more time may find it")


def _order(plan: Plan) -> Iterator[Lever]:
    least = working_set_bound(plan.graph) if plan.schedule.claimed else plan.schedule.bound
    room = plan.schedule.max_live - least
    if room > 0:
        what = f"a better order than {plan.schedule.policy!r} may exist"
        yield Lever(name="order", saves=room, text=f"{what}: no order can save more than {format_bytes(room)}")


def _counted(count: int, total: int) -> str:
    """Return "3 x 412 MiB" for equal parts, "5 with 12 MiB" otherwise."""
    if count == 1:
        return format_bytes(total)
    return f"{count} x {format_bytes(total // count)}" if total % count == 0 else f"{count} with {format_bytes(total)}"


def _made_by(op: str, module: str) -> str:
    name = op.removesuffix(".default") or "unknown op"
    return f"{name} in {module}" if module else name
