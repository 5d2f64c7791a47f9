"""The steps at which buffers and storages of a plan are read or written, and the ops that do so."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from memplan.core.graph import Graph
from memplan.core.plan import Plan


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
    return OpAt(
        step=step,
        name=op.name,
        target=op.target,
        phase=op.phase.value,
        module=op.origin.module,
        source=op.origin.source,
    )


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
