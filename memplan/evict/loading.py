"""Policies that decide about what the step makes, for steps whose model and caller are on the host.

Several ways are tried and the fastest is taken: `flow` and `delta`, which move what is in the way; everything streamed kept on
the device throughout, the policy deciding about the rest; and loading as an op of the graph (the ext-tstack note's
`load`), so that the policy drops a parameter and loads it again as it would drop and recompute an activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from memplan.errors import BudgetInfeasible, InvalidEviction
from memplan.evict.arrays import measure
from memplan.evict.delta import delta
from memplan.evict.events import Event, Events, Kind
from memplan.evict.floor import infeasible
from memplan.evict.flow import flow
from memplan.evict.overlap import overlapped
from memplan.evict.resident import with_streamed_kept
from memplan.evict.workload import Policy, Workload
from memplan.graph import Op, Value

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
    inner, op_of, loads = _with_loads(workload)
    return tuple(_copies(workload, policy(inner), op_of, loads))


def _with_loads(workload: Workload) -> tuple[Workload, dict[int, int], dict[int, int]]:
    """The step with a load before the first use of each storage that is given; of each of its ops, which op of
    `workload` it is, or which storage it loads."""
    g = workload.graph
    first: dict[int, list[int]] = {}
    for s in sorted(workload.streamed - workload.fresh):
        if workload.uses[s]:
            first.setdefault(workload.uses[s][0], []).append(s)
    values, ops, seconds = list(g.values), list[Op](), list[float]()
    op_of, loads = dict[int, int](), dict[int, int]()
    for i, op in enumerate(g.ops):
        for s in first.get(i, ()):
            storage = g.storages[s]
            values.append(
                Value(name=f"{storage.name}:load", storage=s, dtype="uint8", shape=(storage.nbytes,), strides=(1,), offset=0)
            )
            loads[len(ops)] = s
            ops.append(
                Op(
                    name=f"load:{storage.name}",
                    target=LOAD,
                    phase=op.phase,
                    reads=(),
                    writes=(len(values) - 1,),
                    direct=True,
                    random=False,
                    origin=storage.origin,
                )
            )
            seconds.append(workload.to_device[s])
        op_of[len(ops)] = i
        ops.append(op)
        seconds.append(workload.seconds[i])
    storages = tuple(replace(s, planned=s.planned or i in workload.streamed) for i, s in enumerate(g.storages))
    graph = replace(g, ops=tuple(ops), values=tuple(values), storages=storages)
    inner = replace(workload, graph=graph, sources=tuple(range(len(ops))), streamed=frozenset())
    inner.__dict__["seconds"] = tuple(seconds)
    return inner, op_of, loads


def _copies(workload: Workload, events: Events, op_of: dict[int, int], loads: dict[int, int]) -> Iterator[Event]:
    """Loads become copies from the host; what the host has already is not copied there again; what the step changed
    goes home after its last writer (of each phase), and comes back for whoever reads it then."""
    w, n = workload, workload.graph.forward_ops
    here: set[int] = set()
    dirty: set[int] = set()
    homeward = {s: {max((i for i in w.writers[s] if i < n), default=-1), w.writers[s][-1]} for s in w.streamed if w.writers[s]}

    def bring(s: int) -> Iterator[Event]:
        if s not in here:
            here.add(s)
            yield Event(Kind.RELOAD, s)
            yield Event(Kind.RELOADED, s)

    def home(s: int) -> Iterator[Event]:
        here.discard(s)
        if s in dirty:
            dirty.discard(s)
            yield Event(Kind.OFFLOAD, s)
            yield Event(Kind.OFFLOADED, s)
        else:
            yield Event(Kind.DROP, s)

    for kind, index in events:
        if kind is not Kind.RUN:
            if index not in w.streamed:
                yield Event(kind, index)
            elif kind is Kind.RELOADED:
                yield from bring(index)
            elif kind in (Kind.DROP, Kind.OFFLOADED) and index in here:
                yield from home(index)
        elif index in loads:
            yield from bring(loads[index])
        else:
            op = op_of[index]
            made = [s for s in w.writes[op] if s in w.fresh and w.writers[s][0] == op]
            for s in dict.fromkeys((*w.reads[op], *w.writes[op])):
                if s in w.streamed and s not in made:
                    yield from bring(s)
            yield Event(Kind.RUN, op)
            written = w.streamed.intersection(w.writes[op])
            here |= written
            dirty |= written
            for s in sorted(written):
                if op in homeward[s]:
                    yield from home(s)
            for s in sorted(here):
                if w.uses[s][-1] == op:
                    yield from home(s)
