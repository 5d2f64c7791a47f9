"""Starts the gathers of a step before their results are needed, in the bytes of the arena that are free meanwhile.

A gather is divided into an op that starts it and one that waits for it, right where it stood, and the start moves up
with what makes its input (a cast, a padding). It moves as far as the arena has room for its result, so that what runs
in between hides the time that it takes. Gathers keep their order among each other. They may overtake other collectives:
the plan fixes one order for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memplan.core.collectives import is_collective, may_run_again, wait_for
from memplan.core.graph import Graph, Op, Phase
from memplan.core.problem import Problem
from memplan.evict.costs import CostModel
from memplan.planning.simulate import simulate

_LEADS = (float("inf"), 2.0, 1.0)  # how early: as early as bytes allow, or so many times the time that is needed
UNLIMITED = 1 << 62  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """A gather: its position, the positions of the ops that make its input for it alone, and the first that all of
    them could have. `nbytes`: of its result in the arena. `made`: the bytes of the input from each of these ops on.
    """

    at: int
    chain: tuple[int, ...]
    earliest: int
    nbytes: int
    made: tuple[int, ...]


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
            found.append(
                _Gather(at=i, chain=chain, earliest=max(after, begins), nbytes=size[-1], made=tuple(size[:-1]))
            )
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
            start, size = gather.at, gather.nbytes + sum(gather.made)
            floor = max(lowest, gather.earliest)
            while start > floor and clock[start] > at:
                if now[start - 1] + size > live or flying[start - 1] + gather.nbytes > in_flight:
                    break
                start -= 1
            if all(position in gather.chain for position in range(start, gather.at)):
                start = gather.at  # nothing would run meanwhile
            for position in range(start, gather.at):
                now[position] += size
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
        ops: list[Op] = []
        sources: list[int] = []
        for i, op in enumerate(self.graph.ops):
            for gather in before.get(i, ()):
                ops += [self.graph.ops[j] for j in gather.chain]
                ops.append(replace(self.graph.ops[gather.at], starts=True))
                sources += [self.sources[j] for j in (*gather.chain, gather.at)]
            if i not in moved:
                ops.append(wait_for(op) if i in early else op)
                sources.append(-1 if i in early else self.sources[i])
        return replace(self, graph=replace(self.graph, ops=tuple(ops)), sources=tuple(sources))

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
    change = [0] * (steps + 1)
    for buffer in problem.buffers:
        for segment in buffer.segments:
            change[segment.start] += buffer.size
            change[segment.end] -= buffer.size
    total, found = 0, []
    for delta in change[:-1]:
        total += delta
        found.append(total)
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
