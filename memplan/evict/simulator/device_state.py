"""The device that an evicting runtime sees: where every storage is, and whose bytes make room for others.

What is here is known at every moment. When bytes are wanted that are not free, the policy names a storage to give up
and says how. Everything that happens is an event.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Event, Kind
from memplan.evict.recompute_limits import limits
from memplan.evict.simulator.memory import SimulatedMemory
from memplan.evict.working_set import floor
from memplan.evict.workload import Workload


class Location(enum.Enum):
    """Where a storage is."""

    NEVER = "not yet made"
    HERE = "on the device"
    DEAD = "released after its last use"
    GONE = "dropped"
    AWAY = "on the host"


class EvictionKind(enum.Enum):
    """How bytes are given up."""

    DROP = "compute it again"
    SWAP = "copy it to the host and back"


class Evictor(Protocol):
    """A policy on demand."""

    swaps: bool

    def choose(self, device: DeviceState, candidates: Sequence[int]) -> int:
        """The storage to give up next, one of `candidates` (never empty)."""
        ...

    def way(self, device: DeviceState, storage: int) -> EvictionKind:
        """How; asked only where both are possible."""
        ...

    def changed(self, device: DeviceState, storage: int) -> None:
        """Told whenever a storage comes or goes."""
        ...


class DeviceState:
    """Its state. `position` is the op whose turn it is, `clock` the seconds of the ops that ran, `given` storages are
    the caller's; those that are held are not given up.
    """

    def __init__(self, workload: Workload, memory: SimulatedMemory, evictor: Evictor) -> None:
        self.workload, self.memory, self.evictor = workload, memory, evictor
        count = len(workload.size)
        self.given = workload.streamed - workload.fresh
        self.where = [Location.AWAY if s in self.given else Location.NEVER for s in range(count)]
        self.limit = limits(workload)
        self.last = [uses[-1] if uses else -1 for uses in workload.uses]
        self.touched = [0.0] * count
        self.clock = 0.0
        self.position = 0
        self.events: list[Event] = []
        self._clean = [s in self.given for s in range(count)]  # the host has the same bytes
        self._locks = [0] * count
        self._here: dict[int, None] = {}

    def next_use(self, storage: int) -> int:
        """The next op that uses it, after the current one; the number of ops where there is none."""
        uses = self.workload.uses[storage]
        at = bisect_right(uses, self.position)
        return uses[at] if at < len(uses) else len(self.workload.graph.ops)

    def clean(self, storage: int) -> bool:
        """Whether the host has the same bytes."""
        return self._clean[storage]

    def seconds(self, storage: int) -> float:
        """Of the ops that make it."""
        return sum(self.workload.seconds[i] for i in self.workload.writers[storage])

    def held_once(self, s: int) -> bool:
        """Whether one holds it, which is the op that runs."""
        return self._locks[s] == 1

    def touch(self, i: int, *, again: bool) -> None:
        """Op i has run: what it used is used now, and what it wrote is no longer what the host has."""
        for s in (*self.workload.reads[i], *self.workload.writes[i]):
            self.touched[s] = self.clock
        for s in self.workload.writes[i]:
            self._clean[s] = self._clean[s] and again

    def appear(self, s: int) -> None:
        """It has been made."""
        self._here[s] = None
        self._move(s, Location.HERE)

    # -- bytes -------------------------------------------------------------------------------------------

    def take(self, key: int, size: int) -> None:
        """Bytes for `key`, whatever must go for them."""
        while size and not self.memory.take(key, size):
            candidates = [s for s in self._here if not self._locks[s] and self.workload.size[s] and self._ways(s)]
            if not candidates:
                raise self.infeasible("nothing is left to be given up")
            s = self.evictor.choose(self, candidates)
            ways = self._ways(s)
            way = ways[0] if len(ways) == 1 else self.evictor.way(self, s)
            if way is EvictionKind.DROP:
                self.drop(s)
            else:
                self.swap_out(s)

    def _ways(self, s: int) -> tuple[EvictionKind, ...]:
        """How it can be given up now."""
        made = self.workload.writers[s] and self.workload.writers[s][-1] <= self.position
        ways = [EvictionKind.DROP] if made and self.limit[s] >= max(self.last[s], self.position) else []
        free = s in self.workload.streamed and self.last[s] <= self.position
        return (*ways, EvictionKind.SWAP) if self.evictor.swaps or free else tuple(ways)

    def give(self, key: int, size: int) -> None:
        """What `take` took."""
        if size:
            self.memory.give(key)

    def release(self, s: int) -> None:
        """After its last use."""
        if s in self.workload.streamed:
            self.swap_out(s)
            return
        self.give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, Location.DEAD)

    def hand_over(self, host: int, result: int) -> None:
        """After the op ran in place: the input is no longer there."""
        self.memory.hand_over(host, result)
        self._here.pop(host)
        if self.next_use(host) < len(self.workload.graph.ops):
            self.emit(Kind.DROP, host)
            self._move(host, Location.AWAY)
        else:
            self._move(host, Location.DEAD)

    def drop(self, s: int) -> None:
        """Forget it: it can be made again."""
        if self.where[s] is Location.GONE:
            return
        self.emit(Kind.DROP, s)
        if self.where[s] is Location.HERE:
            self.give(s, self.workload.size[s])
            self._here.pop(s)
        self._move(s, Location.GONE)

    def swap_out(self, s: int) -> None:
        """To the host, without a copy where that has the same bytes."""
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
        """Back from the host."""
        self.take(s, self.workload.size[s])
        self.emit(Kind.RELOAD, s)
        self.emit(Kind.RELOADED, s)
        self.touched[s] = self.clock
        self.appear(s)

    # -- small things ------------------------------------------------------------------------------------

    def _move(self, s: int, where: Location) -> None:
        self.where[s] = where
        self.evictor.changed(self, s)

    def hold(self, storages: Sequence[int]) -> None:
        """Give none of them up until `let_go`."""
        for s in storages:
            self._locks[s] += 1

    def let_go(self, storages: Sequence[int]) -> None:
        """The end of one `hold`."""
        for s in storages:
            self._locks[s] -= 1

    def emit(self, kind: Kind, index: int) -> None:
        """The next event."""
        self.events.append(Event(kind, index))

    def infeasible(self, why: str) -> BudgetInfeasible:
        """What to raise where the op whose turn it is cannot be run."""
        least, at = floor(self.workload)
        ops = self.workload.graph.ops
        return BudgetInfeasible(
            f"does not fit in {self.workload.budget} bytes this way: {why}",
            op=ops[at].name,
            smallest=least,
            where=f"op {ops[self.position].name}",
            hint=f"policy='auto' finds more ways; no plan needs less than {least} bytes (op {ops[at].name})",
        )
