"""Policies that decide about what the step makes, for steps whose model and caller are on the host.

Several ways are tried and the fastest is taken: `flow` and `delta`, which move what is in the way; everything streamed
kept on the device throughout, the policy deciding about the rest; and loading as an op of the graph (the ext-tstack
note's `load`), so that the policy drops a parameter and loads it again as it would an activation that it recomputes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from memplan.core.graph import Op, Phase, Storage, Value
from memplan.errors import BudgetInfeasible, InvalidEviction
from memplan.evict.costs import signature_of
from memplan.evict.events import Event, Events, Kind
from memplan.evict.host_resident import with_streamed_kept
from memplan.evict.judge.arrays import measure
from memplan.evict.judge.overlap import overlapped
from memplan.evict.policies.delta import delta
from memplan.evict.policies.flow import flow
from memplan.evict.working_set import infeasible
from memplan.evict.workload import Policy, Workload

LOAD = "memplan.load"


def while_loading(workload: Workload, policy: Policy, *, swaps: bool, search: bool = True) -> Events:
    """The fastest of these ways. `policy` decides about steps in which nothing is streamed; without `search`, or where
    everything fits, it is not asked. `swaps`: what the step makes may be copied to the host too. Raises
    `BudgetInfeasible` when no way is found: with swaps, below the floor only."""
    fits = measure(workload, workload.plain).peak <= workload.budget
    ways: list[Policy] = [flow] if swaps or fits else []
    if not fits:
        ways += [delta] if swaps else []
        ways += [partial(way, policy=policy) for way in (with_streamed_kept, _loads_as_ops) if search or not swaps]
    found = []
    for way in ways:
        with suppress(BudgetInfeasible, InvalidEviction):
            events = overlapped(workload, way(workload))
            if measure(workload, events).peak <= workload.budget:
                found.append(events)
    if not found:
        raise infeasible(workload)
    return min(found, key=lambda events: measure(workload, events).seconds)


def _loads_as_ops(workload: Workload, policy: Policy) -> Events:
    """What `policy` does with a step in which a load is an op, in terms of copies."""
    inner, ops = _with_loads(workload)
    translation = _Translation(workload)
    for kind, index in policy(inner):
        if kind is not Kind.RUN:
            translation.move(kind, index)
        elif ops[index] < 0:
            translation.bring(~ops[index])
        else:
            translation.run(ops[index])
    return tuple(translation.events)


def _with_loads(workload: Workload) -> tuple[Workload, list[int]]:
    """The step with a load before the first use of each storage that is given; and of each of its ops, which op of
    `workload` it is, or ~s where it loads s."""
    g = workload.graph
    first: dict[int, list[int]] = {}
    for s in sorted(workload.streamed - workload.fresh):
        if workload.uses[s]:
            first.setdefault(workload.uses[s][0], []).append(s)
    values, ops, of = list(g.values), list[Op](), list[int]()
    for i, op in enumerate(g.ops):
        for s in first.get(i, ()):
            values.append(_bytes_of(g.storages[s], s))
            ops.append(_load(g.storages[s], len(values) - 1, op.phase))
            of.append(~s)
        ops.append(op)
        of.append(i)
    storages = tuple(replace(s, planned=s.planned or i in workload.streamed) for i, s in enumerate(g.storages))
    graph = replace(g, ops=tuple(ops), values=tuple(values), storages=storages)
    loads = {signature_of(graph, op): workload.to_device[~i] for op, i in zip(ops, of, strict=True) if i < 0}
    costs = replace(workload.costs, measured={**workload.costs.measured, **loads})  # what the link takes
    return replace(workload, graph=graph, sources=tuple(range(len(ops))), streamed=frozenset(), costs=costs), of


def _bytes_of(storage: Storage, index: int) -> Value:
    name = f"{storage.name}:load"
    return Value(name=name, storage=index, dtype="uint8", shape=(storage.nbytes,), strides=(1,), offset=0)


def _load(storage: Storage, value: int, phase: Phase) -> Op:
    return Op(
        name=f"load:{storage.name}",
        target=LOAD,
        phase=phase,
        reads=(),
        writes=(value,),
        direct=True,
        random=False,
        origin=storage.origin,
    )


@dataclass(slots=True)
class _Translation:
    """Events of a step with loads become copies: loads come from the host; what the host has already is not copied
    there again; what the step changed goes home after its last writer of each phase, and comes back when it is read."""

    workload: Workload
    events: list[Event] = field(default_factory=list)
    here: set[int] = field(default_factory=set)  # streamed storages on the device
    changed: set[int] = field(default_factory=set)  # of them, those whose bytes the host does not have

    def run(self, op: int) -> None:
        """Run `op` of the workload; its operands come, what it was the last to want goes."""
        w = self.workload
        written = w.streamed.intersection(w.writes[op])
        touched = sorted(w.streamed.intersection((*w.reads[op], *w.writes[op])))
        for s in touched:
            if s not in w.fresh or w.writers[s][0] != op:
                self.bring(s)
        self.events.append(Event(Kind.RUN, op))
        self.here |= written
        self.changed |= written
        for s in touched:
            if w.uses[s][-1] == op or (s in written and op in self._last_writers(s)):
                self.home(s)

    def move(self, kind: Kind, s: int) -> None:
        """Give up a storage, or have it back."""
        if s not in self.workload.streamed:
            self.events.append(Event(kind, s))
        elif kind is Kind.RELOADED:
            self.bring(s)
        elif kind in (Kind.DROP, Kind.OFFLOADED) and s in self.here:
            self.home(s)

    def bring(self, s: int) -> None:
        """Have it on the device."""
        if s not in self.here:
            self.here.add(s)
            self.events += [Event(Kind.RELOAD, s), Event(Kind.RELOADED, s)]

    def home(self, s: int) -> None:
        """Have it on the host alone."""
        self.here.discard(s)
        if s in self.changed:
            self.changed.discard(s)
            self.events += [Event(Kind.OFFLOAD, s), Event(Kind.OFFLOADED, s)]
        else:
            self.events.append(Event(Kind.DROP, s))

    def _last_writers(self, s: int) -> tuple[int, int]:
        """The last op of the forward that writes it (-1: none), and the last of all."""
        writers, n = self.workload.writers[s], self.workload.graph.forward_ops
        return max((i for i in writers if i < n), default=-1), writers[-1]
