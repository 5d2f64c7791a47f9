"""Lets collectives run beside ops: gathers start early, and reductions are waited for when they are complete.

A gather is divided into an op that starts it and one that waits for it, right where it stood, and the start moves up
with what makes its input (a cast, a padding). It moves as far as the arena has room for its result, so that what runs
in between hides the time that it takes. Gathers keep their order among each other. They may overtake other collectives:
the plan fixes one order for all ranks.

A reduction is divided into an op that starts it where it stood, and one that waits for it later. What uses its result
(a division, a cast, the update of the parameter) moves down with the wait. The gradient that is reduced keeps its bytes
until then, so that a wait comes as soon as the arena has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from memplan.core.collectives import WAIT, is_collective, may_run_again, wait_for
from memplan.core.graph import Graph, Op, Phase
from memplan.core.graph_edit import GraphEdit
from memplan.core.problem import Problem
from memplan.evict.costs import Clock, CostModel, simulate

_LEADS = (float("inf"), 2.0, 1.0)  # how early: as early as bytes allow, or so many times the time that is needed
UNLIMITED = 1 << 62  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """A gather: its position, the positions of the ops that make its input for it alone, and the first that all of
    them could have. `nbytes`: of its result in the arena. `size`: with what these ops make.
    """

    at: int
    chain: tuple[int, ...]
    earliest: int
    nbytes: int
    size: int


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """A step whose ops are in the order in which they run, with the sources of its ops and its buffers."""

    graph: Graph
    sources: tuple[int, ...]
    problem: Problem

    @cached_property
    def gathers(self) -> tuple[_Gather, ...]:
        """The gathers of parameters, in the order in which they run."""
        graph = self.graph
        writers: dict[int, list[int]] = {}
        readers: dict[int, list[int]] = {}
        for i, op in enumerate(graph.ops):
            for s in graph.written(op):
                writers.setdefault(s, []).append(i)
            for v in op.reads:
                readers.setdefault(graph.values[v].storage, []).append(i)
        first = next((i for i, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD), 0)
        sizes = {b.id: b.size for b in self.problem.buffers}
        found = []
        for i, op in enumerate(graph.ops):
            if not may_run_again(op.target) or op.starts or len(op.reads) != 1 or len(op.writes) != 1:
                continue
            chain = _chain(graph, i, writers, readers)
            moved = (*chain, i)
            given = {graph.values[v].storage for j in moved for v in graph.ops[j].reads}
            given -= {s for j in chain for s in graph.written(graph.ops[j])}
            after = max((w for s in given for w in writers.get(s, ()) if w < moved[0]), default=-1) + 1
            size = [sizes.get(graph.storages[s].name, 0) for j in moved for s in graph.written(graph.ops[j])]
            begins = first if op.phase is Phase.BACKWARD else 0
            found.append(_Gather(at=i, chain=chain, earliest=max(after, begins), nbytes=size[-1], size=sum(size)))
        return tuple(found)

    def fastest(self, costs: CostModel, *, live: int, in_flight: int) -> StepOrder:
        """Return the step with gathers that start early enough to take the least time; they need no more than `live`
        bytes at once, and no more than `in_flight` bytes of results are under way.
        """
        tried = (self.started(self.positions(costs, lead, live=live, in_flight=in_flight)) for lead in _LEADS)
        return min(tried, key=lambda one: round(simulate(one.graph, costs)[0], 9))

    def positions(self, costs: CostModel, lead: float, *, live: int, in_flight: int) -> list[int]:
        """Return the position before which each gather starts, its own for one that cannot start early."""
        now, flying = bytes_alive(self.problem, len(self.graph.ops)), [0] * len(self.graph.ops)
        clock, wanted = self._wanted(costs, lead)
        found: list[int] = []
        lowest = 0
        for gather, at in zip(self.gathers, wanted, strict=True):
            start, floor = gather.at, max(lowest, gather.earliest)
            while start > floor and clock[start] > at:
                if now[start - 1] + gather.size > live or flying[start - 1] + gather.nbytes > in_flight:
                    break
                start -= 1
            if all(position in gather.chain for position in range(start, gather.at)):
                start = gather.at  # nothing would run meanwhile
            for position in range(start, gather.at):
                now[position] += gather.size
                flying[position] += gather.nbytes
            if start < gather.at:
                flying[gather.at] += gather.nbytes  # what starts at its wait starts before it
            found.append(start)
            lowest = max(lowest, start + (start == gather.at))
        return found

    def started(self, positions: Sequence[int]) -> StepOrder:
        """Return the step in which each gather starts before the op at a position, and is waited for at its own."""
        early = {g.at: (g, start) for g, start in zip(self.gathers, positions, strict=True) if start < g.at}
        before: dict[int, list[_Gather]] = {}
        for gather, start in early.values():
            before.setdefault(start, []).append(gather)
        moved = {j for gather, _ in early.values() for j in gather.chain}
        edit = GraphEdit(self.graph)
        for i, op in enumerate(self.graph.ops):
            for gather in before.get(i, ()):
                for j in gather.chain:
                    edit.add(self.graph.ops[j], self.sources[j])
                edit.add(replace(self.graph.ops[gather.at], starts=True), self.sources[gather.at])
            if i in early:
                edit.add(wait_for(op))
            elif i not in moved:
                edit.add(op, self.sources[i])
        return replace(self, graph=edit.finish(), sources=tuple(edit.sources))

    def _wanted(self, costs: CostModel, lead: float) -> tuple[list[float], list[float]]:
        """Return the time of each op if gathers take none, and the time by which each gather should have started."""
        seconds = [costs.op_seconds(self.graph, op) for op in self.graph.ops]
        clock = [0.0]
        for op, took in zip(self.graph.ops, seconds, strict=True):
            clock.append(clock[-1] + (0.0 if may_run_again(op.target) else took))
        found: list[float] = []
        following = float("inf")
        for gather in reversed(self.gathers):
            following = min(clock[gather.at], following) - lead * seconds[gather.at]
            found.append(following)
        return clock, found[::-1]


def bytes_alive(problem: Problem, steps: int) -> list[int]:
    """Return the bytes of the buffers of a problem that are alive at each of so many steps."""
    found = [0] * steps
    for (start, live), (end, _) in pairwise((*problem.live_profile, (steps, 0))):
        found[start:end] = [live] * (end - start)
    return found


def _chain(graph: Graph, gather: int, writers: dict[int, list[int]], readers: dict[int, list[int]]) -> tuple[int, ...]:
    """Return the ops (positions) that make what a gather reads, for it alone; () if it reads a parameter itself.

    An op that changes anything else, or draws random numbers, is in no chain, nor is what makes its input then.
    """
    found: list[int] = []
    wanted = [graph.values[v].storage for v in graph.ops[gather].reads]
    users = {gather}
    while wanted:
        storage = wanted.pop()
        if not graph.storages[storage].planned:
            continue
        made = writers.get(storage, [])
        alone = bool(made) and made[-1] < gather and set(readers.get(storage, ())) <= users | set(made)
        plain = all(graph.written(graph.ops[j]) == (storage,) and _repeats(graph.ops[j]) for j in made)
        if not alone or not plain:
            return tuple(sorted(found))
        found += made
        users |= set(made)
        wanted += [s for j in made for s in _read(graph, graph.ops[j]) if s != storage]
    return tuple(sorted(found))


def _read(graph: Graph, op: Op) -> Iterator[int]:
    return (graph.values[v].storage for v in op.reads)


def _repeats(op: Op) -> bool:
    """Return whether an op may move: it draws no numbers, raises no errors, and needs no other rank."""
    return not op.random and not op.only_raises and not is_collective(op.target)


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
    moving = _Moving(graph=graph, sources=sources, clock=Clock(graph, costs), edit=GraphEdit(graph))
    for position, op in enumerate(graph.ops):
        moving.end_complete()
        while moving.late and (live[position] + moving.nbytes > limit or moving.nbytes > in_flight):
            moving.end_first()
        moving.take(position, op)
    while moving.late:
        moving.end_first()
    return moving.edit.finish(), tuple(moving.edit.sources)


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
    edit: GraphEdit
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
        self.edit.add(op, source)

    def _needs(self, op: Op, late: _Late) -> bool:
        """Return whether an op uses what is not there before the wait, or changes what is still read."""
        written = set(self.graph.written(op))
        return bool(late.written & set(self.graph.touched(op)) or late.read & written)

    def _may_wait(self, op: Op) -> bool:
        """Return whether an op may move down: it runs once, draws no numbers, raises no errors, needs no other rank."""
        return op.target != WAIT and not op.starts and "@" not in op.name and _repeats(op)


def _reduces(op: Op) -> bool:
    """Return whether an op is a reduction of the backward that could be waited for later."""
    alone = len(op.reads) == 1 and len(op.writes) == 1 and not op.starts
    late = op.phase is Phase.BACKWARD and alone and is_collective(op.target)
    return late and not may_run_again(op.target)
