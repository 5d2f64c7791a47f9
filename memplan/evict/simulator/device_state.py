"""The simulated device: where every storage is, and which one is evicted to make room for another.

When an allocation does not fit, the evictor selects a storage and whether it is dropped or swapped. Every change is
recorded as an event.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Event, Kind
from memplan.evict.simulator.memory import SimulatedMemory
from memplan.evict.workload import Workload
from memplan.evict.workload_limits import floor, limits


class Location(enum.Enum):
    """The state of a storage's bytes."""

    NEVER = "not yet made"
    HERE = "on the device"
    DEAD = "released after its last use"
    GONE = "dropped"
    AWAY = "on the host"


class EvictionKind(enum.Enum):
    """The two ways to evict a storage."""

    DROP = "compute it again"
    SWAP = "copy it to the host and back"


class Evictor(Protocol):
    """The part of an on-demand policy that selects what to evict, and how."""

    swaps: bool

    def choose(self, device: DeviceState, candidates: Sequence[int]) -> int:
        """Return the storage to evict next, one of `candidates` (never empty)."""
        ...

    def choose_kind(self, device: DeviceState, storage: int) -> EvictionKind:
        """Return how to evict `storage`; called only where both kinds are possible."""
        ...

    def changed(self, device: DeviceState, storage: int) -> None:
        """Take note that the location of `storage` has changed."""
        ...


class DeviceState:
    """The state of the simulated device.

    `position` is the op that runs now or next, `clock` the seconds of the ops that ran. `given` are the caller's
    storages. Storages that are held (`hold`) are not evicted.
    """

    def __init__(self, workload: Workload, memory: SimulatedMemory, evictor: Evictor) -> None:
        self.workload, self.memory, self.evictor = workload, memory, evictor
        count = len(workload.size)
        self.given = workload.host_resident - workload.fresh
        self.where = [Location.AWAY if s in self.given else Location.NEVER for s in range(count)]
        self.limit = limits(workload)
        self.last = [uses[-1] if uses else -1 for uses in workload.uses]
        self.touched = [0.0] * count
        self.clock = 0.0
        self.position = 0
        self.events: list[Event] = []
        self._clean = [s in self.given for s in range(count)]  # the host has the same bytes
        self._seconds = [sum(workload.seconds[i] for i in writers) for writers in workload.writers]
        self._locks = [0] * count
        self._here: dict[int, None] = {}

    def next_use(self, storage: int) -> int:
        """Return the next op after the current one that uses the storage; the number of ops if there is none."""
        uses = self.workload.uses[storage]
        at = bisect_right(uses, self.position)
        return uses[at] if at < len(uses) else len(self.workload.graph.ops)

    def clean(self, storage: int) -> bool:
        """Return whether the host has the same bytes."""
        return self._clean[storage]

    def seconds(self, storage: int) -> float:
        """Return the seconds of the ops that write the storage."""
        return self._seconds[storage]

    def held_once(self, s: int) -> bool:
        """Return whether only the running op holds the storage."""
        return self._locks[s] == 1

    def touch(self, i: int, *, recompute: bool) -> None:
        """Record that op i has run: its storages were touched now, and the host's copies of its results are stale."""
        for s in (*self.workload.reads[i], *self.workload.writes[i]):
            self.touched[s] = self.clock
        for s in self.workload.writes[i]:
            self._clean[s] = self._clean[s] and recompute

    def appear(self, s: int) -> None:
        """Record that a storage is on the device now."""
        self._here[s] = None
        self._move(s, Location.HERE)

    # -- bytes -------------------------------------------------------------------------------------------

    def take(self, key: int, size: int) -> None:
        """Allocate `size` bytes for `key`, and evict storages until they fit."""
        while size and not self.memory.take(key, size):
            candidates = [s for s in self._here if not self._locks[s] and self.workload.size[s] and self._ways(s)]
            if not candidates:
                raise self.infeasible("nothing is left to be given up")
            s = self.evictor.choose(self, candidates)
            ways = self._ways(s)
            kind = ways[0] if len(ways) == 1 else self.evictor.choose_kind(self, s)
            if kind is EvictionKind.DROP:
                self.drop(s)
            else:
                self.swap_out(s)

    def _ways(self, s: int) -> tuple[EvictionKind, ...]:
        """Return the ways in which a storage can be evicted now."""
        made = self.workload.writers[s] and self.workload.writers[s][-1] <= self.position
        ways = [EvictionKind.DROP] if made and self.limit[s] >= max(self.last[s], self.position) else []
        free = s in self.workload.host_resident and self.last[s] <= self.position
        return (*ways, EvictionKind.SWAP) if self.evictor.swaps or free else tuple(ways)

    def give(self, key: int, size: int) -> None:
        """Free what `take` allocated."""
        if size:
            self.memory.give(key)

    def release(self, s: int) -> None:
        """Free a storage after its last use."""
        if s in self.workload.host_resident:
            self.swap_out(s)
            return
        self.give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, Location.DEAD)

    def hand_over(self, host: int, result: int) -> None:
        """Move the bytes of input `host` to `result`, after an op that ran in place."""
        self.memory.hand_over(host, result)
        self._here.pop(host)
        if self.next_use(host) < len(self.workload.graph.ops):
            self.emit(Kind.DROP, host)
            self._move(host, Location.AWAY)
        else:
            self._move(host, Location.DEAD)

    def drop(self, s: int) -> None:
        """Drop a storage, which can be recomputed."""
        if self.where[s] is Location.GONE:
            return
        self.emit(Kind.DROP, s)
        if self.where[s] is Location.HERE:
            self.give(s, self.workload.size[s])
            self._here.pop(s)
        self._move(s, Location.GONE)

    def swap_out(self, s: int) -> None:
        """Offload a storage, without a copy where the host has the same bytes."""
        if self._clean[s]:
            self.emit(Kind.DROP, s)
        else:
            self.emit(Kind.OFFLOAD, s)
            self.emit(Kind.OFFLOADED, s)
        self._clean[s] = True
        self.give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, Location.AWAY)

    def load(self, s: int) -> None:
        """Reload a storage from the host."""
        self.take(s, self.workload.size[s])
        self.emit(Kind.RELOAD, s)
        self.emit(Kind.RELOADED, s)
        self.touched[s] = self.clock
        self.appear(s)

    # -- locks and events --------------------------------------------------------------------------------

    def _move(self, s: int, where: Location) -> None:
        self.where[s] = where
        self.evictor.changed(self, s)

    def hold(self, storages: Sequence[int]) -> None:
        """Keep these storages from being evicted until `let_go`."""
        for s in storages:
            self._locks[s] += 1

    def let_go(self, storages: Sequence[int]) -> None:
        """Undo one `hold`."""
        for s in storages:
            self._locks[s] -= 1

    def emit(self, kind: Kind, index: int) -> None:
        """Append an event."""
        self.events.append(Event(kind, index))

    def infeasible(self, why: str) -> BudgetInfeasible:
        """Return the error for an op that cannot run within the budget."""
        least, at = floor(self.workload)
        ops = self.workload.graph.ops
        return BudgetInfeasible(
            f"does not fit in {self.workload.budget} bytes this way: {why}",
            op=ops[at].name,
            smallest=least,
            where=f"op {ops[self.position].name}",
            hint=f"policy='auto' finds more ways; no plan needs less than {least} bytes (op {ops[at].name})",
        )
