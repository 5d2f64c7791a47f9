"""Ops that one call can run as well as several, brought together: small updates of a whole step.

An update that waits keeps its gradient alive. So it waits only while that raises no peak: max live stays what it is,
with and without alignment, and the bound and its proof hold for the new order as they do for any.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memplan.core.graph import Graph
from memplan.core.in_place_reuse import placed
from memplan.core.legal_orders import predecessors
from memplan.core.schedule import Schedule, live_bytes, storage_intervals


@dataclass(slots=True)
class _Waiting:
    """Ops that could have run, by kind in the order of their coming, and the bytes that they keep."""

    by_kind: dict[Hashable, list[int]] = field(default_factory=dict)
    ops: set[int] = field(default_factory=set)
    nbytes: int = 0

    def add(self, op: int, kind: Hashable, nbytes: int) -> None:
        self.by_kind.setdefault(kind, []).append(op)
        self.ops.add(op)
        self.nbytes += nbytes

    def go(self) -> list[int]:
        """All of them, those of a kind together; none waits any more."""
        found = [op for ops in self.by_kind.values() for op in ops]
        self.by_kind, self.ops, self.nbytes = {}, set(), 0
        return found


def gather(graph: Graph, schedule: Schedule, kinds: Mapping[int, Hashable], alignment: int) -> Schedule:
    """`schedule` with the ops in `kinds` (op -> kind) postponed and those of one kind side by side, as far as max live
    allows: that of storages as they are, and rounded up to `alignment` bytes each.

    Linear in what ops touch. The schedule itself where there is nothing to gather.
    """
    order = schedule.order
    room = _Room(graph, order, alignment)
    before = predecessors(graph)
    waiting, made = _Waiting(), list[int]()
    for step, op in enumerate(order):
        kept = room.kept_by(op, step) if op in kinds else None
        must_go = step == graph.forward_ops or before[op] & waiting.ops
        if must_go or (kept is None and not room.has(step, waiting.nbytes)):
            made += waiting.go()
        if kept is None:
            made.append(op)
        else:
            waiting.add(op, kinds[op], kept)
    made += waiting.go()
    if tuple(made) == order:
        return schedule
    found = tuple(made)
    return replace(
        schedule,
        policy=f"{schedule.policy} + gather",
        order=found,
        max_live=max(live_bytes(graph, found), default=0),
    )


class _Room:
    """What an order leaves below its max live at each step, and which storages die where."""

    def __init__(self, graph: Graph, order: tuple[int, ...], alignment: int) -> None:
        self._graph = placed(graph, order)
        self._live = storage_intervals(graph, order)
        self._alignment = alignment
        steps = len(order)
        plain, aligned = [0] * (steps + 1), [0] * (steps + 1)
        for storage, live in self._live.items():
            s = graph.storages[storage]
            if s.planned:
                for profile, nbytes in ((plain, s.nbytes), (aligned, self._rounded(s.nbytes))):
                    profile[live.start] += nbytes
                    profile[live.end] -= nbytes
        profiles = [list(accumulate(change))[:-1] for change in (plain, aligned)]
        highest = [max(profile, default=0) for profile in profiles]
        pairs = zip(*profiles, strict=True)
        self._left: list[int] = [min(h - now for h, now in zip(highest, both, strict=True)) for both in pairs]

    def has(self, step: int, nbytes: int) -> bool:
        """Whether `nbytes` more (rounded up) raise no peak at a step."""
        return nbytes <= self._left[step]

    def kept_by(self, op: int, step: int) -> int | None:
        """Bytes (rounded up) that stay when `op` waits; None when they do not all die at it, so that others could take
        them in place, when the caller keeps some, or when it makes some, beside those that wait for others."""
        touched = [s for s in self._graph.touched(self._graph.ops[op]) if self._graph.storages[s].planned]
        if any(self._live[s].end != step + 1 or self._live[s].start == step for s in touched):
            return None
        return sum(self._rounded(self._graph.storages[s].nbytes) for s in touched)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment
