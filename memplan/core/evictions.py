"""The evictions of a plan: which storage is evicted or compressed, how it returns, and at which steps."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memplan.core.collectives import WAIT
from memplan.core.graph import Graph, Op, StorageKind
from memplan.core.problem import Solution
from memplan.errors import InvalidPlan

OFFLOAD, OFFLOAD_WAIT = "memplan.offload", "memplan.offload_wait"
RELOAD, RELOAD_WAIT = "memplan.reload", "memplan.reload_wait"
SEND, SEND_WAIT = "memplan.send", "memplan.send_wait"  # from one device to another
TRANSFERS = (OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, SEND, SEND_WAIT, WAIT)
SAVE_RNG = "memplan.save_rng"  # writes the state of the random generator, for an op that draws the same numbers again
RNG_STATE_BYTES = 5056  # of the CPU's generator, as torch.get_rng_state() returns it


class Action(enum.Enum):
    """The way in which an evicted storage gets its contents back; the value is the word for users."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COMPRESS = "compress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One eviction of a storage, in Capuchin's terms; steps are those of the plan's schedule.

    `evicted_access` is the step of the last use before the eviction, `back_access` that of the next use after it. At
    step `in_trigger` the reload or the recomputation starts. `instance` is the storage that holds the contents from
    then on.
    """

    storage: str
    instance: str
    action: Action
    nbytes: int
    evicted_access: int
    in_trigger: int
    back_access: int


def evictions_of(graph: Graph, instances: Sequence[tuple[int, int]]) -> tuple[Eviction, ...]:
    """Return every eviction that is followed by another use of the storage.

    `instances` are pairs (storage, storage that holds the same contents later), in the order of first use.
    """
    touches: dict[int, list[int]] = {}
    for step, op in enumerate(graph.ops):
        for s in graph.touched(op):
            touches.setdefault(s, []).append(step)
    found = []
    previous: dict[int, int] = {}
    for base, instance in instances:
        steps = touches[instance]
        using = [s for s in steps if instance not in graph.written(graph.ops[s])]
        if not using:
            continue  # discarded, or kept until the end without a use
        kept = graph.storages[base].kind in (StorageKind.OUTPUT, StorageKind.GRADIENT)
        if kept and not graph.storages[base].planned and graph.ops[steps[0]].target != RELOAD:
            previous[base] = instance
            continue  # made for the caller, who gets it on the host
        before = [s for s in touches.get(previous.get(base, base), ()) if s < steps[0]]
        accesses = [s for s in before if graph.ops[s].target not in TRANSFERS]
        found.append(
            Eviction(
                storage=graph.storages[base].name,
                instance=graph.storages[instance].name,
                action=Action.OFFLOAD if graph.ops[steps[0]].target == RELOAD else Action.RECOMPUTE,
                nbytes=graph.storages[base].nbytes,
                evicted_access=accesses[-1] if accesses else 0,
                in_trigger=steps[0],
                back_access=using[0],
            )
        )
        previous[base] = instance
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArena:
    """The arena of one device in a plan for several devices: the offsets [start, start + size), bytes.

    All are bytes: `max_live` is the lower bound of its size in this order, `arena_budget` its largest allowed size, and
    `budget` the most that its device may hold in all (None: no limit).
    """

    device: str
    start: int
    size: int
    max_live: int
    arena_budget: int
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """The record of how a plan keeps its budget. The plan's graph has an op for every recomputation and every copy.

    `budget` limits the total, `arena_budget` the arena, `host_budget` the arena of the host copies, `pinned_budget` the
    same where it is page-locked; all are bytes, and None is no limit. `arena_budget` is the size of the arena where the
    user gave no limit of it. `costs` names the cost model that predicted `seconds` (of a training step), `stall` (the
    part of them spent waiting for copies) and `base_seconds` (without evictions). `sources[i]` is the op of the traced
    graph that op i is or recomputes, -1 for a copy and for an op that saves the state of the random generator.
    `instances` are pairs (storage, storage that holds the same contents later), in the order of first use. `host`
    places the host copies in an arena of their own. `device` is the device of a step whose parameters, inputs and
    results are all on the host and copied; "" if the step runs where they are. `updating` are the bytes there that an
    optimizer's own `step()` then needs. `sections` are the arenas of several devices, in their order; empty for one
    device.
    """

    policy: str
    costs: str
    budget: int | None = None
    arena_budget: int
    host_budget: int | None = None
    pinned_budget: int | None = None
    seconds: float
    base_seconds: float
    stall: float
    sources: tuple[int, ...]
    instances: tuple[tuple[int, int], ...]
    host: Solution
    device: str = ""
    updating: int = 0
    sections: tuple[DeviceArena, ...] = ()

    @property
    def overhead(self) -> float:
        """The predicted slowdown: seconds / base_seconds - 1."""
        return self.seconds / self.base_seconds - 1 if self.base_seconds else 0.0


def check_record(graph: Graph, plan: EvictionPlan) -> None:
    """Raise `InvalidPlan` naming the first part of `plan` that does not belong to `graph`."""
    if len(plan.sources) != len(graph.ops):
        raise InvalidPlan("needs one source per op", where="eviction.sources")
    for i, (op, source) in enumerate(zip(graph.ops, plan.sources, strict=True)):
        if source < -1 or (source == -1) != (op.target in (*TRANSFERS, SAVE_RNG)):
            raise InvalidPlan(f"names no op that {op.name!r} could repeat", where=f"eviction.sources[{i}]")
    _check_instances(graph, plan)
    _check_saved_states(graph, plan)
    sizes = (plan.budget, plan.arena_budget, plan.host_budget, plan.pinned_budget, plan.updating)
    if min(filter(None, sizes), default=0) < 0 or min(plan.seconds, plan.base_seconds, plan.stall) < 0:
        raise InvalidPlan("a budget, a size or a time is negative", where="eviction")
    if plan.stall > plan.seconds:
        raise InvalidPlan(f"a step of {plan.seconds} s cannot wait for {plan.stall} s", where="eviction.stall")


def _check_instances(graph: Graph, plan: EvictionPlan) -> None:
    """Raise `InvalidPlan` unless `plan.instances` are exactly the storages that begin with a reload or a recomputed op,
    or that are made for the caller, each paired with the storage whose contents it holds."""
    storages = graph.storages
    outside = {life for base, life in plan.instances if 0 <= base < len(storages) and not storages[base].planned}
    born: list[int] = []
    touched: set[int] = set()
    seen: set[int] = set()
    for op, source in zip(graph.ops, plan.sources, strict=True):
        repeated = op.target in (RELOAD, RELOAD_WAIT) or source in seen
        new = [s for s in graph.touched(op) if s not in touched]
        born += [s for s in new if (storages[s].planned or s in graph.released) and (repeated or s in outside)]
        touched.update(new)
        seen |= {source} - {-1}
    lives: dict[int, int] = {}
    for i, pair in enumerate(plan.instances):
        where = f"eviction.instances[{i}]"
        if not all(0 <= s < len(storages) for s in pair):
            raise InvalidPlan("names no storages of the graph", where=where)
        base, further = (storages[s] for s in pair)
        lives[pair[0]] = lives.get(pair[0], 0) + 1
        if further.name != f"{base.name}@{lives[pair[0]]}" or further.nbytes != base.nbytes:
            raise InvalidPlan(f"{further.name!r} is not the next instance of {base.name!r}", where=where)
    if [further for _, further in plan.instances] != sorted(born):
        raise InvalidPlan("are not the storages that begin with a reload or a repeated op", where="eviction.instances")


def _check_saved_states(graph: Graph, plan: EvictionPlan) -> None:
    """Raise `InvalidPlan` unless each op that runs again and draws random numbers reads the state that was saved
    directly before its first run, with no other random op between them."""
    drawn = {s: op for op, s in zip(reversed(graph.ops), reversed(plan.sources), strict=True) if s >= 0}  # first runs
    base_of = {life: base for base, life in plan.instances}
    saved: dict[int, int] = {}  # storage of a state -> the source of the random op that runs next
    waiting: list[int] = []
    for i, (op, source) in enumerate(zip(graph.ops, plan.sources, strict=True)):
        where = f"graph.ops[{i}]"
        if op.target == SAVE_RNG:
            waiting.append(_state_written(graph, op, saved, where))
            saved[waiting[-1]] = -1
            continue
        if op.target in TRANSFERS:
            continue
        state = graph.saved_state(op)
        if op.random:
            saved.update(dict.fromkeys(waiting, source))
            waiting = []
        first = drawn[source]
        if op is first or not first.random:
            if state is not None:
                raise InvalidPlan(f"{op.name!r} needs no generator state", where=where)
            continue
        storage = -1 if state is None else graph.values[state].storage
        if op.random or saved.get(base_of.get(storage, storage)) != source:
            what = f"{op.name!r} does not draw with the generator state saved right before {first.name!r}"
            raise InvalidPlan(what, where=where)


def _state_written(graph: Graph, op: Op, saved: Mapping[int, int], where: str) -> int:
    """Return the storage that an op saves the generator's state in. Raises `InvalidPlan` if it cannot be one."""
    values = [graph.values[v] for v in op.writes]
    whole = [(v.dtype, v.shape, v.strides, v.offset) == ("uint8", (RNG_STATE_BYTES,), (1,), 0) for v in values]
    if op.reads or whole != [True] or not op.random:
        raise InvalidPlan(f"{op.name!r} does not save the state of the random generator", where=where)
    storage = graph.storages[values[0].storage]
    known = storage.kind is StorageKind.RNG_STATE and storage.planned and storage.nbytes == RNG_STATE_BYTES
    if not known or storage.device != "cpu" or values[0].storage in saved:
        raise InvalidPlan(f"{storage.name!r} is no new storage for the state of the CPU's generator", where=where)
    return values[0].storage


PACKING, PACKED = "_packing", "_packed_as_"  # compressing ops; the last one is "_packed_as_" + format
UNPACKED, UNPACKING = "_unpacked_as_", "_unpacking"  # decompressing ops; the first one has the former


def compressions_of(graph: Graph, order: Sequence[int]) -> tuple[Eviction, ...]:
    """Return every storage that is compressed and decompressed, in the order of decompression; steps are positions in
    `order`.

    `Eviction.instance` is the storage with the decompressed contents. The compressed form is a third storage.
    """
    steps = [graph.ops[i] for i in order]
    packed: dict[int, tuple[int, int]] = {}  # compressed storage -> (its source, the step of the source's last use)
    last: dict[int, int] = {}
    found = []
    for step, op in enumerate(steps):
        if not _is_compression(op.name):
            last.update(dict.fromkeys(graph.touched(op), step))
            continue
        source, filled = _from_to(graph, op)
        if UNPACKED in op.name:
            origin, before = packed.get(source, (source, step))
            found.append(_eviction(graph, steps, step, origin, before))
        elif UNPACKING not in op.name and filled != source:
            packed[filled] = packed.get(source, (source, last.get(source, step)))
    return tuple(found)


def _eviction(graph: Graph, steps: Sequence[Op], step: int, storage: int, before: int) -> Eviction:
    """Return the eviction of `storage` from step `before` until the decompression that starts at `step`."""
    instance = _from_to(graph, steps[step])[1]
    back = step
    for k in range(step + 1, len(steps)):
        op = steps[k]
        if instance not in graph.touched(op):
            continue
        if not _is_compression(op.name):
            back = k
            break
        source, filled = _from_to(graph, op)
        instance = filled if source == instance else instance
    return Eviction(
        storage=graph.storages[storage].name,
        instance=graph.storages[instance].name,
        action=Action.COMPRESS,
        nbytes=graph.storages[storage].nbytes,
        evicted_access=before,
        in_trigger=step,
        back_access=back,
    )


def _from_to(graph: Graph, op: Op) -> tuple[int, int]:
    """Return the storage that a compressing or decompressing op reads first, and the one that it writes."""
    return graph.values[op.reads[0]].storage, graph.written(op)[0]


def _is_compression(name: str) -> bool:
    """Return whether an op of this name compresses or decompresses a storage."""
    return any(part in name for part in (PACKING, PACKED, UNPACKED, UNPACKING))
