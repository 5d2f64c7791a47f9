"""Lets a step wait for the reductions of gradients only when they are complete, and go on with its backward meanwhile.

A reduction is divided into an op that starts it where it stood, and one that waits for it later. What uses its result
(a division, a cast, the update of the parameter) moves down with the wait. The gradient that is reduced keeps its bytes
until then, so that a wait comes as soon as the arena has no room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memplan.core.collectives import WAIT, is_collective, may_run_again, wait_for
from memplan.core.graph import Graph, Op, Phase
from memplan.evict.costs import CostModel
from memplan.planning.simulate import Clock

_MOST = 16  # ops that move down with a wait


def with_late_waits(
    graph: Graph,
    sources: Sequence[int],
    costs: CostModel,
    *,
    live: Sequence[int],
    limit: int,
    in_flight: int,
) -> tuple[Graph, tuple[int, ...]]:
    """Return a graph whose reductions are waited for when they are predicted to be complete, and its sources.

    Args:
        graph: The graph; its ops are in the order in which they run.
        sources: A number for each op; those of waits are -1.
        costs: The cost model that predicts times.
        live: The bytes that are alive in the arena at each op.
        limit: The most bytes that may be alive.
        in_flight: The most bytes of gradients that may be under way.
    """
    moving = _Moving(graph=graph, sources=sources, clock=Clock(graph, costs))
    for position, op in enumerate(graph.ops):
        moving.end_complete()
        while moving.late and (live[position] + moving.nbytes > limit or moving.nbytes > in_flight):
            moving.end_first()
        moving.take(position, op)
    while moving.late:
        moving.end_first()
    return replace(graph, ops=tuple(moving.ops)), tuple(moving.kept)


@dataclass(slots=True, kw_only=True)
class _Late:
    """A reduction that is under way: its op, when it is complete, and the ops (positions) that wait for it.

    `written` are the storages that it or they write, `read` those that they read.
    """

    op: Op
    nbytes: int
    end: float
    then: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class _Moving:
    """The ops so far in their new order, their sources, and the reductions that are under way, the first ones first."""

    graph: Graph
    sources: Sequence[int]
    clock: Clock
    ops: list[Op] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    late: list[_Late] = field(default_factory=list)
    nbytes: int = 0

    def take(self, position: int, op: Op) -> None:
        """Add an op here, or let it wait with the reduction whose result it needs."""
        last = next((i for i in reversed(range(len(self.late))) if self._needs(op, self.late[i])), -1)
        if last >= 0 and self._may_wait(op) and len(self.late[last].then) < _MOST:
            self.late[last].then.append(position)
            self.late[last].read.update(self.graph.values[v].storage for v in op.reads)
            self.late[last].written.update(self.graph.written(op))
            return
        stays = op.random or op.only_raises  # what was before it stays before it
        for _ in range(len(self.late) if stays else last + 1):
            self.end_first()
        if not _reduces(op):
            self._add(op, self.sources[position])
            return
        op = replace(op, starts=True)
        self._add(op, self.sources[position])
        read, written = (self.graph.values[one[0]].storage for one in (op.reads, op.writes))
        storage = self.graph.storages[read]
        nbytes = storage.nbytes if storage.planned else 0
        self.nbytes += nbytes
        self.late.append(
            _Late(op=op, nbytes=nbytes, end=self.clock.ends[read, written], read={read}, written={written})
        )

    def end_complete(self) -> None:
        """Wait for the reductions that are predicted to be complete."""
        while self.late and self.late[0].end <= self.clock.now:
            self.end_first()

    def end_first(self) -> None:
        """Wait for the first reduction, and add what needs its result."""
        first = self.late.pop(0)
        self.nbytes -= first.nbytes
        self._add(wait_for(first.op), -1)
        for position in first.then:
            self._add(self.graph.ops[position], self.sources[position])

    def _add(self, op: Op, source: int) -> None:
        self.clock.run(op)
        self.ops.append(op)
        self.kept.append(source)

    def _needs(self, op: Op, late: _Late) -> bool:
        """Return whether an op uses what is not there before the wait, or changes what is still read."""
        written = set(self.graph.written(op))
        return bool(late.written & set(self.graph.touched(op)) or late.read & written)

    def _may_wait(self, op: Op) -> bool:
        """Return whether an op may move down: it runs once, draws no numbers, raises no errors, needs no other rank."""
        once = op.target != WAIT and not op.starts and "@" not in op.name
        return once and not op.random and not op.only_raises and not is_collective(op.target)


def _reduces(op: Op) -> bool:
    """Return whether an op is a reduction of the backward that could be waited for later."""
    alone = len(op.reads) == 1 and len(op.writes) == 1 and not op.starts
    late = op.phase is Phase.BACKWARD and alone and is_collective(op.target)
    return late and not may_run_again(op.target)
