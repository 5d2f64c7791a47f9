"""Adapts a policy to steps whose model and caller stay on the host.

Several ways are tried and the fastest is taken: `flow` and `delta`, which offload on demand, and loading as an op of
the graph (the ext-tstack note's `load`), so that the policy drops and reloads a parameter as it drops and recomputes an
activation.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from memplan.core.graph import Op, Phase, Storage
from memplan.core.graph_edit import GraphEdit
from memplan.errors import BudgetInfeasible, InvalidEviction
from memplan.evict.costs import signature_of
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies.delta import delta
from memplan.evict.policies.flow import flow
from memplan.evict.workload import Event, Events, Kind, Policy, Workload, infeasible

LOAD = "memplan.load"


def while_loading(workload: Workload, policy: Policy, *, swaps: bool, search: bool = True) -> Events:
    """Return the fastest events that keep the budget of a workload with host-resident storages.

    `policy` is for workloads without host-resident storages; without `search`, or where everything fits, it is not
    called. `swaps`: the step's own storages may be offloaded too. Raises `BudgetInfeasible` when no events are found:
    with swaps, only below the floor.
    """
    fits = measure(workload, workload.plain).peak <= workload.budget
    ways: list[Policy] = [flow] if swaps or fits else []
    if not fits:
        ways += [delta] if swaps else []
        ways += [partial(_loads_as_ops, policy=policy)] if search or not swaps else []
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
    """Return the events of `policy` for the step in which loads are ops, with those ops translated to copies."""
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
    """Return the workload with a load op before the first use of each storage that the caller gives.

    The second result is, for each op, its index in `workload`, or ~s where it loads storage s.
    """
    g = workload.graph
    first: dict[int, list[int]] = {}
    for s in sorted(workload.host_resident - workload.fresh):
        if workload.uses[s]:
            first.setdefault(workload.uses[s][0], []).append(s)
    edit = GraphEdit(g)
    edit.storages = [replace(s, planned=s.planned or i in workload.host_resident) for i, s in enumerate(g.storages)]
    for i, op in enumerate(g.ops):
        for s in first.get(i, ()):
            edit.add(_load(g.storages[s], edit.whole(s, "load"), op.phase), ~s)
        edit.add(op, i)
    graph, of = edit.finish(), edit.sources
    loads = {signature_of(graph, op): workload.to_device[~i] for op, i in zip(graph.ops, of, strict=True) if i < 0}
    costs = replace(workload.costs, measured={**workload.costs.measured, **loads})  # a load costs its copy
    return replace(workload, graph=graph, sources=tuple(range(len(of))), host_resident=frozenset(), costs=costs), of


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
    """Translates the events of a step with load ops into copies.

    A load becomes a reload. What the host has already is not copied there again. What the step changed is offloaded
    after its last writer of each phase, and reloaded when it is read.
    """

    workload: Workload
    events: list[Event] = field(default_factory=list)
    here: set[int] = field(default_factory=set)  # host-resident storages that are on the device now
    changed: set[int] = field(default_factory=set)  # those of them whose bytes the host does not have

    def run(self, op: int) -> None:
        """Run `op` of the workload: load its operands before it, free what has its last use there after it."""
        w = self.workload
        written = w.host_resident.intersection(w.writes[op])
        touched = sorted(w.host_resident.intersection((*w.reads[op], *w.writes[op])))
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
        """Evict a storage, or bring it back."""
        if s not in self.workload.host_resident:
            self.events.append(Event(kind, s))
        elif kind is Kind.RELOADED:
            self.bring(s)
        elif kind in (Kind.DROP, Kind.OFFLOADED) and s in self.here:
            self.home(s)

    def bring(self, s: int) -> None:
        """Load a storage unless it is on the device."""
        if s not in self.here:
            self.here.add(s)
            self.events += [Event(Kind.RELOAD, s), Event(Kind.RELOADED, s)]

    def home(self, s: int) -> None:
        """Free a storage's bytes on the device, after a copy to the host if it was changed."""
        self.here.discard(s)
        if s in self.changed:
            self.changed.discard(s)
            self.events += [Event(Kind.OFFLOAD, s), Event(Kind.OFFLOADED, s)]
        else:
            self.events.append(Event(Kind.DROP, s))

    def _last_writers(self, s: int) -> tuple[int, int]:
        """Return the last op of the forward that writes a storage (-1: none), and the last of the whole step."""
        writers, n = self.workload.writers[s], self.workload.graph.forward_ops
        return max((i for i in writers if i < n), default=-1), writers[-1]
