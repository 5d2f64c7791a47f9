"""Groups ops that one fused call can run: the small optimizer updates of a whole training step.

A postponed update keeps its gradient alive. It is postponed only as long as max live does not rise, with and without
alignment padding. The bound and its proof hold for all orders, and so for the new one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memplan.core.graph import Graph
from memplan.core.in_place import placed
from memplan.core.legal_orders import predecessors
from memplan.core.schedule import Schedule, live_bytes, storage_intervals


@dataclass(slots=True)
class _Postponed:
    """The postponed ops, by kind in the order of the schedule, and the bytes that they keep alive."""

    by_kind: dict[Hashable, list[int]] = field(default_factory=dict)
    ops: set[int] = field(default_factory=set)
    nbytes: int = 0

    def add(self, op: int, kind: Hashable, nbytes: int) -> None:
        self.by_kind.setdefault(kind, []).append(op)
        self.ops.add(op)
        self.nbytes += nbytes

    def take(self) -> list[int]:
        """Remove and return all postponed ops, grouped by kind."""
        found = [op for ops in self.by_kind.values() for op in ops]
        self.by_kind, self.ops, self.nbytes = {}, set(), 0
        return found


def gather(graph: Graph, schedule: Schedule, kinds: Mapping[int, Hashable], alignment: int) -> Schedule:
    """Return the schedule in which ops of one kind run next to each other, as far as max live does not rise.

    `kinds` maps each op that may be postponed to its kind. Max live is kept for sizes as they are, and for sizes
    rounded up to `alignment` bytes. Returns `schedule` itself if no op can be grouped. Linear in the storages that ops
    touch.
    """
    order = schedule.order
    slack = _Slack(graph, order, alignment)
    before = predecessors(graph)
    postponed, made = _Postponed(), list[int]()
    for step, op in enumerate(order):
        kept = slack.kept_by(op, step) if op in kinds else None
        must_run = step == graph.forward_ops or before[op] & postponed.ops
        if must_run or (kept is None and not slack.has(step, postponed.nbytes)):
            made += postponed.take()
        if kept is None:
            made.append(op)
        else:
            postponed.add(op, kinds[op], kept)
    made += postponed.take()
    if tuple(made) == order:
        return schedule
    found = tuple(made)
    return replace(
        schedule,
        policy=f"{schedule.policy} + gather",
        order=found,
        max_live=max(live_bytes(graph, found), default=0),
    )


def with_host_early(graph: Graph, schedule: Schedule) -> Schedule:
    """Return the schedule in which each op of the host runs as soon as what it waits for has run.

    It touches nothing in the arena, so that live bytes are the same.
    """
    if not any(op.on_host for op in graph.ops):
        return schedule
    before, places = predecessors(graph), dict[int, tuple[int, int, int]]()
    for step, op in enumerate(schedule.order):  # behind its last predecessor, which may be an op of the host itself
        after = max([(graph.forward_ops - 1, 0, 0), *(places[other] for other in before[op])])
        places[op] = (after[0], after[1] + 1, step) if graph.ops[op].on_host else (step, 0, 0)
    return replace(schedule, order=tuple(sorted(schedule.order, key=places.__getitem__)))


class _Slack:
    """The bytes below max live at each step of an order, and the live intervals of its storages."""

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
        """Return whether `nbytes` more bytes (rounded up) at a step leave max live unchanged."""
        return nbytes <= self._left[step]

    def kept_by(self, op: int, step: int) -> int | None:
        """Return the bytes (rounded up) that stay alive while `op` is postponed; None if it must not be postponed.

        It may be postponed only if all planned storages that it touches exist before it and have their last use at it.
        """
        touched = [s for s in self._graph.touched(self._graph.ops[op]) if self._graph.storages[s].planned]
        if any(self._live[s].end != step + 1 or self._live[s].start == step for s in touched):
            return None
        return sum(self._rounded(self._graph.storages[s].nbytes) for s in touched)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment
