"""The buffers of a plan with their origin, largest first, and the steps at which each is read or written."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memplan.core.graph import Graph, Origin
from memplan.core.jsonio import to_json
from memplan.core.plan import Plan
from memplan.core.problem import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A buffer and where it comes from.

    `size` is in bytes, as planned (alignment and red zones included); alive during steps [start, end).
    `module` is a module path ("h.0.attn"), `source` the user's line ("model.py:12"), `op` the op that writes it first
    ("aten.mm"); each is empty if the trace does not know it.
    """

    id: str
    size: int
    kind: str
    start: int
    end: int
    module: str
    source: str
    op: str

    @classmethod
    def of(cls, buffer: Buffer, origin: Origin, op: str) -> Holder:
        """Return the holder of a buffer whose storage has this origin and is written by `op`."""
        live, where = buffer.live, {"module": origin.module, "source": origin.source, "op": op}
        return cls(id=buffer.id, size=buffer.size, kind=buffer.kind, start=live.start, end=live.end, **where)


def largest(plan: Plan, count: int | None = None) -> tuple[Holder, ...]:
    """Return the `count` largest buffers of `plan` (all when None); ties by definition order."""
    return _holders(plan, plan.problem.buffers, count)


def alive_at(plan: Plan, step: int, count: int | None = None) -> tuple[Holder, ...]:
    """Return the `count` largest buffers of `plan` that are alive at `step`; ties by definition order."""
    return _holders(plan, plan.problem.alive_at(step), count)


def _holders(plan: Plan, buffers: Iterable[Buffer], count: int | None) -> tuple[Holder, ...]:
    graph, makers = plan.placed, dict[str, str]()  # the first op that writes, not the allocation before an `out=`
    for index in plan.schedule.order:
        for storage in graph.written(graph.ops[index]):
            makers.setdefault(graph.storages[storage].name, graph.ops[index].target)
    origins = {storage.name: storage.origin for storage in plan.graph.storages}
    found = ((b, origins.get(b.id, Origin())) for b in sorted(buffers, key=lambda b: -b.size)[:count])
    return tuple(Holder.of(b, origin, makers.get(b.id, origin.op)) for b, origin in found)


def records(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for each buffer, in the order of first use: where it is, when it is alive, and where it is from."""
    values = {plan.graph.storages[v.storage].name: v for v in reversed(plan.graph.values)}
    devices = {s.name: s.device for s in plan.graph.storages}
    holders, peak = {holder.id: holder for holder in largest(plan)}, plan.problem.peak_step
    found = []
    for buffer in plan.problem.buffers:
        value, row = values.get(buffer.id), to_json(holders[buffer.id])
        where = {"buffer": row.pop("id"), "nbytes": row.pop("size"), "offset": plan.solution.offsets[buffer.id]}
        what = {"dtype": value.dtype if value else "", "shape": value.shape if value else ()}
        at_peak = any(s.start <= peak < s.end for s in buffer.segments)
        found.append({**where, "device": devices.get(buffer.id, ""), **what, "at_peak": at_peak, **row})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpAt:
    """The op that runs at `step`; `phase` is "forward" or "backward"."""

    step: int
    name: str
    target: str
    phase: str
    module: str
    source: str


def op_at(plan: Plan, step: int) -> OpAt:
    """Return the op at `step`, which must be a step of the schedule."""
    op = plan.graph.ops[plan.schedule.order[step]]
    where = {"module": op.origin.module, "source": op.origin.source}
    return OpAt(step=step, name=op.name, target=op.target, phase=op.phase.value, **where)


def touches(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """Return by buffer name the steps whose ops read or write the buffer, ascending."""
    return _touches(plan, plan.placed)


def own_touches(plan: Plan) -> Mapping[str, tuple[int, ...]]:
    """Return by storage name the steps whose ops read or write that storage, other storages in its bytes left out."""
    return _touches(plan, plan.graph)


def homes(plan: Plan) -> Mapping[str, str]:
    """Return by storage name the buffer that holds its bytes: its own, or that of the input that it reuses in place."""
    names = [s.name for s in plan.graph.storages]
    pairs = zip(plan.graph.values, plan.placed.values, strict=True)
    return {names[own.storage]: names[lies.storage] for own, lies in pairs}


def _touches(plan: Plan, graph: Graph) -> Mapping[str, tuple[int, ...]]:
    steps = dict[int, list[int]]()
    for step, index in enumerate(plan.schedule.order):
        for storage in graph.touched(graph.ops[index]):
            steps.setdefault(storage, []).append(step)
    return {graph.storages[storage].name: tuple(found) for storage, found in steps.items()}


def next_use(steps: tuple[int, ...], step: int) -> int | None:
    """Return the first touch after `step`, None when there is none."""
    place = bisect_right(steps, step)
    return steps[place] if place < len(steps) else None


def last_use(steps: tuple[int, ...], step: int) -> int | None:
    """Return the last touch before `step`, None when there is none."""
    place = bisect_left(steps, step)
    return steps[place - 1] if place else None
