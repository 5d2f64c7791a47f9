"""Who holds the bytes: the buffers of a plan with their origin, largest first. For reports and checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.plan import Plan
from memplan.problem import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A buffer and where it comes from.

    `size` is in bytes, as planned (alignment and red zones included); alive during steps [start, end).
    `module` is a module path ("h.0.attn"), `source` the user's line ("model.py:12"), `op` what made it; any
    of them is empty when the trace did not know it.
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
    """The `count` largest buffers of `plan` (all when None); ties by definition order."""
    return _holders(plan, plan.problem.buffers, count)


def alive_at(plan: Plan, step: int, count: int | None = None) -> tuple[Holder, ...]:
    """The `count` largest buffers of `plan` that hold bytes at `step`; ties by definition order."""
    return _holders(plan, plan.problem.alive_at(step), count)


def _holders(plan: Plan, buffers: Iterable[Buffer], count: int | None) -> tuple[Holder, ...]:
    origins = {storage.name: storage.origin for storage in plan.graph.storages}
    return tuple(
        Holder(
            id=buffer.id,
            size=buffer.size,
            kind=buffer.kind,
            start=buffer.live.start,
            end=buffer.live.end,
            module=origins[buffer.id].module,
            source=origins[buffer.id].source,
            op=origins[buffer.id].op,
        )
        for buffer in sorted(buffers, key=lambda b: -b.size)[:count]
    )
