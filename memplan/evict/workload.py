"""Holds what a policy is asked and answers: a scheduled step with its costs and budget, and the events that it runs.

A policy decides for each storage whether it keeps its bytes, is recomputed, or is offloaded and reloaded, and says so
as the sequence of ops and copies that run (`Events`); `apply` builds a graph from them. Host-resident storages belong
to the model or the caller, live on the host, and are loaded into the arena. A policy that never moves them runs through
`with_host_resident_kept`.

The floor is the largest working set of one op: below it no plan exists. The limit of a storage is the last op before
which it can be recomputed; no storage is assumed to be kept beyond its own last use for the sake of a recompute.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memplan.core.collectives import is_collective, may_run_again
from memplan.core.graph import Graph, Op, Phase, StorageKind
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel


class Kind(enum.IntEnum):
    """The kind of an event. The index of a RUN is an op, that of every other kind a storage of the workload's graph."""

    RUN = 0
    """Run the op. A second run recomputes those of its results that were dropped."""
    DROP = 1
    """Free the bytes; a later reader needs a recompute, or a reload where the host has the bytes."""
    OFFLOAD = 2
    """Start the copy to the host; the bytes stay allocated."""
    OFFLOADED = 3
    """Wait for that copy, and free the bytes."""
    RELOAD = 4
    """Allocate bytes, at any offset, and start the copy back into them."""
    RELOADED = 5
    """Wait for that copy; from here on the storage can be used."""


class Event(NamedTuple):
    """One event: its kind, and the index of the op (RUN) or storage (all other kinds) that it concerns."""

    kind: Kind
    of: int


Events = tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A scheduled step that has to fit into a budget. `graph.ops` are in the order in which they run.

    `sources[i]` is the index of op i in the traced graph, -1 for an op that saves a generator state. `budget` and all
    sizes are bytes, sizes rounded up to `alignment`. `host_resident` are the storages of the model and the caller
    (parameters, optimizer state, inputs, outputs, gradients) that live on the host and take arena bytes only while they
    are loaded. `device` is the device that they are loaded to ("": each stays on its own). `host_budget` limits the
    bytes of all offloaded copies that are on the host at once (None: no limit).
    """

    graph: Graph
    sources: tuple[int, ...]
    costs: CostModel
    budget: int
    alignment: int = 1
    host_resident: frozenset[int] = frozenset()
    device: str = ""
    host_budget: int | None = None

    def within(self, budget: int) -> Workload:
        """Return this workload with another budget. Cached properties are kept, since none depends on the budget."""
        other = replace(self, budget=budget)
        other.__dict__.update({**self.__dict__, "budget": budget})
        return other

    @cached_property
    def size(self) -> tuple[int, ...]:
        """The arena bytes of each storage of `held` while it is on the device; 0 for others."""
        return tuple(self.aligned(s) if s in self.held else 0 for s in range(len(self.graph.storages)))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The storages with arena bytes whose content each op reads."""
        g, held = self.graph, self.held
        return tuple(
            tuple(dict.fromkeys(s for v in op.reads if not op.on_host and (s := g.values[v].storage) in held))
            for op in g.ops
        )

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """The storages with arena bytes that each op writes."""
        written = (() if op.on_host else self.graph.written(op) for op in self.graph.ops)
        return tuple(tuple(s for s in of if s in self.held) for of in written)

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """The ops on the device that write each storage, in order."""
        return self._by_storage(self.graph.written)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The ops on the device that read or write each storage, in order."""
        return self._by_storage(self.graph.touched)

    def _by_storage(self, of: Callable[[Op], Iterable[int]], *, host: bool = False) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.graph.storages]
        for i, op in enumerate(self.graph.ops):
            for s in of(op) if host or not op.on_host else ():
                found[s].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """The seconds of each op."""
        return self.costs.seconds(self.graph)

    @cached_property
    def seconds_on_host(self) -> tuple[float, ...]:
        """The seconds that each op takes on the host, beside the device; 0 for ops of the device."""
        return tuple(self.costs.seconds_on_host(self.graph, op) for op in self.graph.ops)

    @cached_property
    def awaited(self) -> tuple[int, ...]:
        """The storage that each op of the host reads and that the device makes: it runs when that is on the host; -1:
        none."""
        g = self.graph
        read = ((g.values[v].storage for v in op.reads) if op.on_host else () for op in g.ops)
        return tuple(next((s for s in of if s in self.fresh), -1) for of in read)

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """The seconds from the start of the step to each op, and to the end, if each op runs once."""
        return tuple(accumulate(self.seconds, initial=0.0))

    @cached_property
    def to_host(self) -> tuple[float, ...]:
        """The seconds to copy each storage to the host."""
        return tuple(self.costs.to_host.seconds(s.nbytes) for s in self.graph.storages)

    @cached_property
    def to_device(self) -> tuple[float, ...]:
        """The seconds to copy each storage to the device."""
        return tuple(self.costs.to_device.seconds(s.nbytes) for s in self.graph.storages)

    @cached_property
    def pairs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (result, input) storages of each op that may be in place, in the order in which they are tried."""
        values = self.graph.values
        found = []
        for op in self.graph.ops:
            inplace_candidates = [
                (values[result].storage, values[read].storage) for result, read in op.inplace_candidates
            ]
            found.append(tuple(sorted(inplace_candidates, key=lambda pair: -self.size[pair[1]])))
        return tuple(found)

    @cached_property
    def redo_until(self) -> tuple[int, ...]:
        """The last position, for each storage, before which its writers can run again to recompute it; -1: never."""
        g, n, found = self.graph, len(self.graph.ops), []
        changed = self._by_storage(g.written, host=True)
        for s, writers in enumerate(self.writers):
            last = n if self.recomputable[s] else -1
            for i in writers if self.recomputable[s] else ():
                op = g.ops[i]
                results = [v for v in op.writes if g.values[v].storage == s]
                for read in op.reads:
                    storage = g.values[read].storage
                    if storage != s and any((v, read) not in op.unrelated for v in results):
                        last = min(last, next((j for j in changed[storage] if j > i), n))
            found.append(last)
        return tuple(found)

    @cached_property
    def recomputable(self) -> tuple[bool, ...]:
        """Whether running the writers of each storage again gives the same bytes, bit by bit."""
        return tuple(self._recomputable(s) for s in range(len(self.graph.storages)))

    @cached_property
    def plain(self) -> Events:
        """Every op once, in order; host-resident storages are loaded before the step and copied back after it."""
        return self.around(tuple(Event(Kind.RUN, i) for i in range(len(self.graph.ops))))

    def around(self, events: Events) -> Events:
        """Return `events`, which move no host-resident storage, with the copies that keep all of them on the device.

        What the forward changes is copied back to the host before the backward begins, and loaded again for it.
        """
        first = self.graph.forward_ops
        border = self.border(events)
        given = [s for s in sorted(self.host_resident - self.fresh - self.late) if self.uses[s]]
        reloads = [s for s in sorted(self.late | self.due) if self.uses[s] and self.uses[s][-1] >= first]
        changed = [s for s in sorted(self.host_resident) if self.writers[s]]
        return (
            *_copied(Kind.RELOAD, given),
            *events[:border],
            *_copied(Kind.OFFLOAD, sorted(self.due)),
            *_copied(Kind.RELOAD, reloads),
            *events[border:],
            *_copied(Kind.OFFLOAD, [s for s in changed if s not in self.due or self.writers[s][-1] >= first]),
        )

    def border(self, events: Events) -> int:
        """Return the first position in `events` at which the forward has run and all of `due` is back on the host."""
        ops, found = self.graph.ops, 0
        left = {i for i, op in enumerate(ops) if op.phase is Phase.FORWARD}
        for position, (kind, index) in enumerate(events):
            if kind is Kind.RUN and ops[index].phase is Phase.BACKWARD:
                break
            if kind is Kind.RUN and index in left:
                left.remove(index)
                found = position + 1
            elif kind is Kind.OFFLOADED and index in self.due:
                found = position + 1
        return found if self.graph.forward_ops < len(ops) else len(events)

    @cached_property
    def fresh(self) -> frozenset[int]:
        """The host-resident storages that the step creates for the caller: there is nothing to load before."""
        made = (StorageKind.OUTPUT, StorageKind.GRADIENT)
        return frozenset(s for s in self.host_resident if self.graph.storages[s].kind in made)

    @cached_property
    def due(self) -> frozenset[int]:
        """The host-resident storages that the forward changes: if a backward follows, they must be back on the host
        when the forward returns.
        """
        n = self.graph.forward_ops
        if n == len(self.graph.ops):
            return frozenset()
        return frozenset(s for s in self.host_resident if self.writers[s] and self.writers[s][0] < n)

    @cached_property
    def late(self) -> frozenset[int]:
        """The host-resident storages that exist only when the backward begins: the incoming gradients."""
        return frozenset(s for s in self.host_resident if self.graph.storages[s].kind is StorageKind.TANGENT)

    @cached_property
    def held(self) -> frozenset[int]:
        """The storages that take arena bytes while they are on the device, and that can be evicted: planned or
        host-resident ones, but not gradients that stay in the arena.
        """
        planned = frozenset(i for i, s in enumerate(self.graph.storages) if s.planned)
        return (planned - self.graph.gradients_in_arena) | self.host_resident

    @cached_property
    def begins(self) -> tuple[tuple[int, ...], ...]:
        """The storages of gradients that stay in the arena whose first write is each op."""
        found: list[list[int]] = [[] for _ in self.graph.ops]
        for s in sorted(self.graph.gradients_in_arena):
            if self.writers[s]:
                found[self.writers[s][0]].append(s)
        return tuple(map(tuple, found))

    @cached_property
    def begun(self) -> tuple[int, ...]:
        """The arena bytes of the gradients that each op begins, and that stay from then on."""
        return tuple(sum(self.aligned(s) for s in storages) for storages in self.begins)

    def aligned(self, storage: int) -> int:
        """Return the bytes of a storage in the arena."""
        return -(-self.graph.storages[storage].nbytes // self.alignment) * self.alignment

    def _recomputable(self, storage: int) -> bool:
        """Return whether a planned storage is written, before its first reader, only by ops that can run twice.

        Such ops are no collectives but gathers of parameters, draw no random numbers without a saved state, and change
        nothing else.
        """
        writers = self.writers[storage]
        if not self.graph.storages[storage].planned or not writers or storage in self.graph.gradients_in_arena:
            return False
        for i in writers:
            op = self.graph.ops[i]
            written = self.graph.written(op)
            if op.random and self.graph.saved_state(op) is None:
                return False
            if is_collective(op.target) and not may_run_again(op.target):
                return False
            if any(not self.graph.storages[s].planned or s in self.graph.gradients_in_arena for s in written):
                return False
            if any(len(self.writers[s]) > 1 and written != (storage,) for s in written):
                return False
        readers = [i for i in self.uses[storage] if i not in writers]
        return not readers or readers[0] > writers[-1]


def _copied(start: Kind, storages: Sequence[int]) -> Events:
    """Return the events that copy each storage in order and wait for each copy."""
    return tuple(Event(kind, s) for s in storages for kind in (start, Kind(start + 1)))


Policy = Callable[[Workload], Events]


def host_resident_storages(graph: Graph) -> frozenset[int]:
    """Return every storage that the model or the caller owns; all are host-resident when the step runs elsewhere."""
    return frozenset(i for i, s in enumerate(graph.storages) if not s.planned)


def with_host_resident_kept(workload: Workload, policy: Policy) -> Events:
    """Return the events of `policy` when the host-resident storages stay on the device for the whole step.

    The policy sees none of them, and its budget is what they leave of the workload's. Raises what `policy` raises.
    """
    if not workload.host_resident:
        return policy(workload)
    kept = sum(workload.size[s] for s in workload.host_resident if workload.uses[s])
    return workload.around(policy(replace(workload, host_resident=frozenset(), budget=workload.budget - kept)))


def floor(workload: Workload) -> tuple[int, int]:
    """Return (bytes, op index) of the largest working set: operands and results, less what the op can do in place.

    Whatever is recomputed or moved, an op's operands and results are on the device while it runs, and the gradients
    that stay in the arena and have begun.
    """
    most, at, staying = 0, 0, 0
    for i in range(len(workload.graph.ops)):
        touched = dict.fromkeys((*workload.reads[i], *workload.writes[i]))
        need = sum(workload.size[s] for s in touched)
        saved = max((workload.size[out] for out, _ in workload.pairs[i]), default=0)
        staying += workload.begun[i]
        if need - saved + staying > most:
            most, at = need - saved + staying, i
    return most, at


def require_floor(workload: Workload) -> None:
    """Raise `BudgetInfeasible`, naming the op that needs the most, if the budget is below the floor."""
    least, at = floor(workload)
    if least > workload.budget:
        name = workload.graph.ops[at].name
        raise BudgetInfeasible(
            f"what op {name} reads and writes is {least} bytes; the budget is {workload.budget}",
            op=name,
            smallest=least,
            hint=f"give at least {least} bytes, or a smaller batch",
        )


def infeasible(workload: Workload) -> BudgetInfeasible:
    """Return the error of a policy that found no way to keep the budget; the caller adds the details."""
    return BudgetInfeasible(f"no way was found to stay within {workload.budget} bytes", op="", smallest=0)


def limits(workload: Workload) -> tuple[int, ...]:
    """Return for each storage the last op before which it can be recomputed, whatever else was evicted; -1: never.

    Its writers must be able to run again by then (`Workload.redo_until`), and each storage that they read must be
    available: it can be recomputed itself, reloaded (host-resident), or it still has a later use of its own. A
    storage may be evicted between two uses only if its limit is not before its last use.
    """
    w = workload
    found = [-1] * len(w.size)
    # A storage is written after everything that its writers read, so the order of first writers is topological.
    for s in sorted((s for s, ops in enumerate(w.writers) if ops and w.recomputable[s]), key=lambda s: w.writers[s][0]):
        until = w.redo_until[s]
        for r in {r for i in w.writers[s] for r in w.reads[i]} - {s, *w.host_resident}:
            last = w.uses[r][-1]
            until = min(until, found[r] if found[r] >= last else last)
        found[s] = until
    return tuple(found)
