"""The buffers of a plan with their origin, largest first, for reports and checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.core.graph import Origin
from memplan.core.plan import Plan
from memplan.core.problem import Buffer

_UNKNOWN = Origin()


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


def largest(plan: Plan, count: int | None = None) -> tuple[Holder, ...]:
    """Return the `count` largest buffers of `plan` (all when None); ties by definition order."""
    return _holders(plan, plan.problem.buffers, count)


def alive_at(plan: Plan, step: int, count: int | None = None) -> tuple[Holder, ...]:
    """Return the `count` largest buffers of `plan` that are alive at `step`; ties by definition order."""
    return _holders(plan, plan.problem.alive_at(step), count)


def _makers(plan: Plan) -> dict[str, str]:
    """Return for each storage the first op that writes it, which says more than the allocation before an `out=`."""
    graph, makers = plan.placed, dict[str, str]()
    for index in plan.schedule.order:
        for storage in graph.written(graph.ops[index]):
            makers.setdefault(graph.storages[storage].name, graph.ops[index].target)
    return makers


def _holders(plan: Plan, buffers: Iterable[Buffer], count: int | None) -> tuple[Holder, ...]:
    origins, makers = {storage.name: storage.origin for storage in plan.graph.storages}, _makers(plan)
    return tuple(
        _holder(buffer, origins.get(buffer.id, _UNKNOWN), makers)
        for buffer in sorted(buffers, key=lambda b: -b.size)[:count]
    )


def _holder(buffer: Buffer, origin: Origin, makers: dict[str, str]) -> Holder:
    return Holder(
        id=buffer.id,
        size=buffer.size,
        kind=buffer.kind,
        start=buffer.live.start,
        end=buffer.live.end,
        module=origin.module,
        source=origin.source,
        op=makers.get(buffer.id, origin.op),
    )
