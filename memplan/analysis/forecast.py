"""Forecasts where a storage is at each step of a plan, and when it is used: `Plan.forecast`."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from memplan.analysis.buffers import next_use, own_touches
from memplan.core.evictions import OFFLOAD, RELOAD, RELOAD_WAIT, TRANSFERS
from memplan.core.graph import StorageKind
from memplan.errors import MemplanError, UnknownName

if TYPE_CHECKING:
    from memplan.core.plan import Plan

_SHOWN = 8  # names in an error
_GIVEN = (
    *(StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE, StorageKind.CONSTANT),
    *(StorageKind.INPUT, StorageKind.TANGENT),
)


class Residence(enum.StrEnum):
    """The location of a storage's bytes; the value is the word that is shown."""

    ARENA = "arena"
    RETURNING = "returning"  # its bytes in the arena are allocated, the copy from the host is under way
    HOST = "host"
    DROPPED = "dropped"  # evicted without a copy, and recomputed before its next use
    OUTSIDE = "outside"  # memory of the model, the caller or autograd
    ABSENT = "absent"  # not computed yet, or not needed any more


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePlace:
    """The location of a storage during the steps [start, end).

    `offset` is in bytes from the beginning of the arena (or of the arena on the host); None if it has no offset there.
    """

    start: int
    end: int
    where: Residence
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The places and uses of a storage of `nbytes` bytes over the `steps` steps of a plan.

    `places` follow one another without a gap from step 0 to the last. `uses` are the steps whose ops read or write it,
    recomputes included and copies left out, ascending. `lives` are its names in the plan: its own, and one for each
    recompute or reload ("gelu@1").
    """

    name: str
    nbytes: int
    kind: str
    steps: int
    places: tuple[StoragePlace, ...]
    uses: tuple[int, ...]
    lives: tuple[str, ...]

    def at(self, step: int) -> StoragePlace:
        """Return where the storage is while the op of `step` runs. Raises `MemplanError` if there is no such step."""
        if not 0 <= step < self.steps:
            what, hint = f"step {step} is not one of the plan's {self.steps}", f"its steps are 0 to {self.steps - 1}"
            raise MemplanError(what, where=self.name, hint=hint)
        return self.places[bisect_right(self.places, step, key=lambda place: place.start) - 1]

    def next_use(self, step: int) -> int | None:
        """Return the first use after `step` (-1: the first of all), None when there is none."""
        return next_use(self.uses, step)


def forecast(plan: Plan, name: str) -> Forecast:
    """Return the forecast of the storage that `name` refers to.

    `name` is the storage's own name, that of one of its further lives or of one of its values, or the path of the
    module that created it, if that created only one. Raises `UnknownName`, whose hint lists similar names.
    """
    hosts = _hosts(plan)
    storage = _find(plan, _bases(plan, hosts), name)
    graph, order, lives, by_name = plan.graph, plan.schedule.order, _lives(plan, storage), own_touches(plan)
    touched = {life: by_name.get(graph.storages[life].name, ()) for life in lives}
    uses = {s for steps in touched.values() for s in steps if graph.ops[order[s]].target not in TRANSFERS}
    found = graph.storages[storage]
    return Forecast(
        name=found.name,
        nbytes=found.nbytes,
        kind=found.kind.value,
        steps=len(order),
        places=tuple(_without_gaps(plan, lives, hosts, touched)),
        uses=tuple(sorted(uses)),
        lives=tuple(graph.storages[life].name for life in lives),
    )


# -- names -----------------------------------------------------------------------------------------------


def _hosts(plan: Plan) -> dict[int, int]:
    """Return, for storages of the arena, the storage with their bytes on the host.

    That is a copy, or for a host-resident storage the storage itself, of which the one in the arena is a life.
    """
    graph, found = plan.graph, dict[int, int]()
    for op in graph.ops:
        if op.target in (OFFLOAD, RELOAD):
            source, destination = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
            device, host = (source, destination) if op.target == OFFLOAD else (destination, source)
            found[device] = host
    return found


def _bases(plan: Plan, hosts: Mapping[int, int]) -> dict[int, int]:
    """Return, for further lives and copies on the host, the storage that they belong to."""
    found = {life: base for base, life in plan.eviction.instances} if plan.eviction else {}
    copies = {host: found.get(device, device) for device, host in hosts.items()}
    return found | {host: base for host, base in copies.items() if host != base}


def _find(plan: Plan, bases: Mapping[int, int], name: str) -> int:
    """Return the storage of that name, never one of its further lives. Raises `UnknownName`."""
    storages = plan.graph.storages
    named = {v.name: v.storage for v in reversed(plan.graph.values)}
    named |= {s.name: i for i, s in reversed(list(enumerate(storages)))}
    if name in named:
        return bases.get(named[name], named[name])
    own = {i: storages[i] for i in range(len(storages)) if i not in bases}
    made = [i for i, s in own.items() if name and s.origin.module == name]
    if len(made) == 1:
        return made[0]
    if made:
        names = ", ".join(storages[i].name for i in made[:_SHOWN])
        hint = f"name one of them: {names}{', ...' if len(made) > _SHOWN else ''}"
        raise UnknownName(f"the module made {len(made)} storages", where=name, hint=hint)
    known = {text for s in own.values() for text in (s.name, s.origin.module) if text}
    close = get_close_matches(name, sorted(known), n=_SHOWN, cutoff=0.5)
    hint = f"did you mean: {', '.join(close)}" if close else "the names are those of plan.graph.storages"
    raise UnknownName("names no storage, value or module of the plan", where=repr(name), hint=hint)


# -- places ----------------------------------------------------------------------------------------------


def _lives(plan: Plan, storage: int) -> list[int]:
    """Return `storage` and those of its further lives that are read; a recompute discards the others."""
    graph = plan.graph
    further = [life for base, life in plan.eviction.instances if base == storage] if plan.eviction else []
    read = {graph.values[v].storage for op in graph.ops if op.target != RELOAD_WAIT for v in op.reads}
    return [storage, *(life for life in further if life in read or life in _kept(plan))]


def _kept(plan: Plan) -> set[int]:
    """Return the storages that the caller keeps, which are alive to the end of the step."""
    return {plan.graph.values[v].storage for v in (*plan.graph.outputs, *plan.graph.gradients)}


def _stays(plan: Plan, touched: Mapping[int, tuple[int, ...]]) -> Iterator[StoragePlace]:
    """Yield where each life is from its first touch to its last."""
    graph, order = plan.graph, plan.schedule.order
    container = {v.storage: plan.placed.values[i].storage for i, v in enumerate(graph.values)}
    for life, steps in touched.items():
        storage = graph.storages[life]
        if not steps or (not storage.planned and (storage.kind in _GIVEN or len(touched) > 1)):
            continue  # the model or the caller owns it, or it is a result that the caller gets on the host
        first, end = steps[0], len(order) if life in _kept(plan) else steps[-1] + 1
        if not storage.planned:
            yield StoragePlace(start=first, end=end, where=Residence.OUTSIDE)
            continue
        offset = plan.solution.offsets.get(graph.storages[container[life]].name)
        offset = None if offset is None else offset + plan.redzone  # a storage without bytes has none
        if graph.ops[order[first]].target == RELOAD:
            arrived = next((s + 1 for s in steps if graph.ops[order[s]].target == RELOAD_WAIT), end)
            yield StoragePlace(start=first, end=arrived, where=Residence.RETURNING, offset=offset)
            first = arrived
        if first < end:
            yield StoragePlace(start=first, end=end, where=Residence.ARENA, offset=offset)


def _without_gaps(
    plan: Plan, lives: list[int], hosts: Mapping[int, int], touched: Mapping[int, tuple[int, ...]]
) -> Iterator[StoragePlace]:
    """Yield the places of a storage from step 0 to the last: those of its lives, and those between them."""
    base = plan.graph.storages[lives[0]]
    given = not base.planned and base.kind in _GIVEN
    on_host = [hosts[life] for life in lives if life in hosts]
    copies = plan.eviction.host.offsets if plan.eviction else {}
    offset = copies.get(plan.graph.storages[on_host[0]].name) if on_host else None
    now, end = 0, len(plan.schedule.order)
    for place in (*sorted(_stays(plan, touched), key=lambda place: place.start), None):
        until = end if place is None else place.start
        if now < until:
            if given or (not base.planned and on_host and now):
                where = Residence.HOST if on_host else Residence.OUTSIDE
            elif place is None or now == 0:
                where = Residence.ABSENT
            else:
                where = Residence.HOST if place.where is Residence.RETURNING else Residence.DROPPED
            yield StoragePlace(start=now, end=until, where=where, offset=offset if where is Residence.HOST else None)
        if place is not None:
            yield place
            now = place.end
