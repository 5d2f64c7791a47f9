"""`dtr`: Dynamic Tensor Rematerialization (Kirisame et al. 2021), a baseline that plans are compared with.

It knows nothing of what comes: ops run in order, and when bytes are wanted that are not free, the storage with the
smallest h is dropped, to be computed again when it is needed. `dtr` counts bytes, as the paper does; `dtr_addresses`
gives every storage an address, first-fit, so that what is free may be in pieces that nothing fits into. Random numbers
are not drawn again, so what depends on them is dropped only while they are there; streamed storages stay once loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memplan.evict.events import Events
from memplan.evict.simulator.device_state import DeviceState, EvictionKind, Location
from memplan.evict.simulator.eviction_simulator import EvictionSimulator
from memplan.evict.simulator.memory import AddressSpace, ByteCounter, SimulatedMemory
from memplan.evict.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What a heuristic knows of a storage: bytes, seconds to make it, seconds of the dropped storages around it
    (which it is made from, and which are made from it), seconds since it was last touched."""

    storage: int
    size: int
    seconds: float
    around: float
    staleness: float


Heuristic = Callable[[Candidate], float]  # the storage with the smallest value is dropped


def h_dtr(candidate: Candidate) -> float:
    """cost / (size x staleness), the cost being that of the dropped neighbourhood too: the paper's h."""
    return _ratio(candidate.seconds + candidate.around, candidate.size * candidate.staleness)


def h_local(candidate: Candidate) -> float:
    """The same without the neighbourhood."""
    return _ratio(candidate.seconds, candidate.size * candidate.staleness)


def h_lru(candidate: Candidate) -> float:
    """Least recently used."""
    return -candidate.staleness


def h_size(candidate: Candidate) -> float:
    """Largest first."""
    return -candidate.size


def dtr(workload: Workload, *, heuristic: Heuristic = h_dtr) -> Events:
    """Events that keep the budget, on-demand. Raises `BudgetInfeasible` when an op's operands cannot be had."""
    return _run(workload, heuristic, ByteCounter(workload.budget))


def dtr_addresses(workload: Workload, *, heuristic: Heuristic = h_dtr) -> Events:
    """The same in memory that has addresses: drops go on until a hole is large enough."""
    return _run(workload, heuristic, AddressSpace(workload.budget))


def _run(workload: Workload, heuristic: Heuristic, memory: SimulatedMemory) -> Events:
    return EvictionSimulator(workload, memory, _Dropper(workload, heuristic)).walk()


class _Dropper:
    """Drops the smallest h."""

    swaps = False

    def __init__(self, workload: Workload, heuristic: Heuristic) -> None:
        self._heuristic = heuristic
        self._around = Neighbourhoods(workload)

    def choose(self, device: DeviceState, candidates: Sequence[int]) -> int:
        return min(candidates, key=lambda s: (self._heuristic(candidate(device, self._around, s)), s))

    def way(self, device: DeviceState, storage: int) -> EvictionKind:
        return EvictionKind.DROP

    def changed(self, device: DeviceState, storage: int) -> None:
        self._around.changed(device, storage)


class Neighbourhoods:
    """Seconds of the dropped storages around each storage, kept until one of them comes or goes.

    Those are the dropped storages that it is made from, and those that are made from it and will be used, through
    others that are dropped too.
    """

    def __init__(self, workload: Workload) -> None:
        count = len(workload.size)
        made_from: list[dict[int, None]] = [{} for _ in range(count)]
        makes: list[dict[int, None]] = [{} for _ in range(count)]
        for reads, writes in zip(workload.reads, workload.writes, strict=True):
            for s in writes:
                for r in reads:
                    if r != s:
                        made_from[s][r] = makes[r][s] = None
        self._made_from = [tuple(found) for found in made_from]
        self._makes = [tuple(found) for found in makes]
        self._known: dict[int, float] = {}

    def seconds(self, device: DeviceState, storage: int) -> float:
        """Of the neighbourhood of `storage`, itself left out."""
        if storage not in self._known:
            below, _ = _reach(device, storage, self._made_from, (Location.GONE, Location.DEAD))
            above, _ = _reach(device, storage, self._makes, (Location.GONE,))
            used = [s for s in above if device.last[s] >= device.position]
            self._known[storage] = sum(map(device.seconds, (*below, *used)))
        return self._known[storage]

    def changed(self, device: DeviceState, storage: int) -> None:
        """Forget what `storage` is part of."""
        self._known.pop(storage, None)
        for edges in (self._made_from, self._makes):
            for s in _reach(device, storage, edges, (Location.GONE, Location.DEAD))[1]:
                self._known.pop(s, None)


def candidate(device: DeviceState, around: Neighbourhoods, storage: int) -> Candidate:
    """What is known of `storage` now."""
    return Candidate(
        storage=storage,
        size=device.workload.size[storage],
        seconds=device.seconds(storage),
        around=around.seconds(device, storage),
        staleness=device.clock - device.touched[storage],
    )


def _reach(
    device: DeviceState, storage: int, edges: Sequence[Sequence[int]], through: Sequence[Location]
) -> tuple[list[int], list[int]]:
    """What is reached from `storage` along `edges`: storages that are as `through` says, and where they end."""
    seen, inside, ends, stack = {storage}, [], [], [storage]
    while stack:
        for s in edges[stack.pop()]:
            if s not in seen:
                seen.add(s)
                if device.where[s] in through:
                    inside.append(s)
                    stack.append(s)
                else:
                    ends.append(s)
    return inside, ends


def _ratio(cost: float, worth: float) -> float:
    return cost / worth if worth > 0 else float("inf")
