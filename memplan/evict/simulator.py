"""Simulates a step op by op under a budget, as a runtime that evicts on demand would run it.

When an allocation does not fit, the evictor selects a storage and whether it is dropped or swapped. An operand that is
absent is recomputed, recursively, or reloaded. A storage is released after its last use, and may be recomputed after
that as the source of another recompute. Every change is recorded as an event. Memory is a number of bytes, or what
`SimulatedMemory` stands for.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Event, Events, Kind, Workload, floor, limits


class SimulatedMemory(Protocol):
    """An allocator. Keys are any integers; a key holds one block at a time."""

    def take(self, key: int, size: int) -> bool:
        """Allocate `size` bytes (at least 1) for `key`; return False, and change nothing, if they do not fit."""
        ...

    def give(self, key: int) -> None:
        """Free the block of `key`."""
        ...

    def hand_over(self, key: int, to: int) -> None:
        """Give the block of `key` to `to`."""
        ...


class ByteCounter:
    """`capacity` bytes without addresses: an allocation fits if the sum does, as most papers count memory."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._held: dict[int, int] = {}

    def take(self, key: int, size: int) -> bool:
        if size > self.free:
            return False
        self.free -= size
        self._held[key] = size
        return True

    def give(self, key: int) -> None:
        self.free += self._held.pop(key)

    def hand_over(self, key: int, to: int) -> None:
        self._held[to] = self._held.pop(key)


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
        self.left = set[int]()  # those away whose bytes on the device were given up, as the host had them already
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
            self.left.add(host)
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
            self.left.add(s)
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
        self.left.discard(s)
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


MOST_RUNS = 40  # of each op on average; a policy that exceeds it is taken to recompute without end


class EvictionSimulator:
    """A simulated run of a workload on a device; `simulate()` runs the step once."""

    def __init__(
        self, workload: Workload, memory: SimulatedMemory, evictor: Evictor, *, most_runs: int = MOST_RUNS
    ) -> None:
        self.workload = workload
        self._most_runs = most_runs
        self.device = DeviceState(workload, memory, evictor)
        self._runs = 0

    def simulate(self) -> Events:
        """Return the events of the step. Raises `BudgetInfeasible` when an op's operands do not fit."""
        for i in range(len(self.workload.graph.ops)):
            self.device.position = i
            if i == self.workload.graph.forward_ops:
                self._offload_due()
            self._run_op(i)
        return tuple(self.device.events)

    # -- ops ---------------------------------------------------------------------------------------------

    def _run_op(self, i: int) -> None:
        """Run op i for the first time: bring its operands to the device, then release what had its last use."""
        w, d = self.workload, self.device
        fresh = {s for s in w.writes[i] if s not in d.given and w.writers[s][0] == i}
        operands = [s for s in dict.fromkeys((*w.reads[i], *w.writes[i])) if s not in fresh]
        d.hold(operands)
        for s in operands:
            self._bring(s)
        self._execute(i, recompute=False)
        d.let_go(operands)
        for s in (*operands, *fresh):
            if d.last[s] == i and d.where[s] is Location.HERE:
                d.release(s)

    def _offload_due(self) -> None:
        """Copy the caller's storages that the forward changed back to the host, at its end."""
        d = self.device
        for s in sorted(self.workload.due):
            if d.where[s] is Location.HERE and not d.clean(s):
                d.swap_out(s)

    def _bring(self, storage: int) -> None:
        """Reload or recompute a storage, and before it the storages that it is computed from."""
        d = self.device
        stack = [storage]
        held: dict[int, tuple[int, ...]] = {}
        while stack:
            top = stack[-1]
            if d.where[top] is Location.AWAY:
                d.load(top)
            if d.where[top] is Location.HERE:
                d.let_go(held.pop(top, ()))
                stack.pop()
                continue
            if d.where[top] is Location.NEVER or d.position > d.limit[top]:
                raise d.infeasible(f"{self.workload.graph.storages[top].name} cannot be made again")
            if top not in held:
                reads = (r for i in self.workload.writers[top] for r in self.workload.reads[i] if r != top)
                held[top] = tuple(dict.fromkeys(reads))
                d.hold(held[top])
            missing = next((r for r in held[top] if d.where[r] is not Location.HERE), None)
            if missing is not None:
                stack.append(missing)
                continue
            d.drop(top)
            for i in self.workload.writers[top]:
                self._execute(i, recompute=True)

    def _execute(self, i: int, *, recompute: bool) -> None:
        """Allocate bytes for the results of op i, whose operands are on the device, and run it."""
        w, d = self.workload, self.device
        first = [s for s in w.writes[i] if s not in d.given and w.writers[s][0] == i]
        new = [s for s in first if (self._is_wanted(s) if recompute else d.where[s] is Location.NEVER)]
        lost = [s for s in first if s not in new]  # written once more, and discarded
        whole = not recompute or all(len(w.writers[s]) == 1 for s in new)  # no later writer wants the same inputs
        host, result = self._takeover(i, new) if whole else (-1, -1)
        for s in new:
            if s != result:
                host, result = self._room_for(i, s, host, result)
        for s in lost:
            d.take(~s, w.size[s])
        for s in [s for s in lost if recompute and self._is_wanted(s)]:  # dropped just now, to make room
            d.give(~s, w.size[s])
            d.take(s, w.size[s])
            lost.remove(s)
            new.append(s)
        if not recompute:
            for s in w.begins[i]:
                d.take(s, w.aligned(s))
        d.hold(new)
        d.emit(Kind.RUN, i)
        self._runs += 1
        if self._runs > self._most_runs * len(w.graph.ops) + 1000:
            raise d.infeasible(f"it recomputes without end: over {self._most_runs} runs for each op of the step")
        d.clock += w.seconds[i]
        if result >= 0:
            d.hand_over(host, result)
        for s in lost:
            d.give(~s, w.size[s])
            if s in d.left:  # it is there again, and has a copy on the host
                d.emit(Kind.DROP, s)
        d.touch(i, recompute=recompute)
        d.let_go(new)
        for s in new:
            d.appear(s)

    def _is_wanted(self, s: int) -> bool:
        """Return whether a recompute of `s` restores a storage that was dropped."""
        return self.device.where[s] is Location.GONE and self.device.position <= self.device.limit[s]

    def _takeover(self, i: int, new: Sequence[int]) -> tuple[int, int]:
        """Return (input, result) where the result can take the bytes of an input without a later use; -1, -1: none."""
        d = self.device
        for result, host in self.workload.pairs[i]:
            free = d.held_once(host) and d.where[host] is Location.HERE
            if result in new and free and d.next_use(host) >= len(self.workload.graph.ops):
                return host, result
        return -1, -1

    def _room_for(self, i: int, s: int, host: int, result: int) -> tuple[int, int]:
        """Allocate bytes for a new `s`, or else take those of an input in place after a copy of it to the host.

        Returns the (input, result) that run in place, as given if `s` got bytes of its own.
        """
        d = self.device
        try:
            d.take(s, self.workload.size[s])
        except BudgetInfeasible:
            pairs = [h for r, h in self.workload.pairs[i] if r == s and d.held_once(h)]
            if result >= 0 or not pairs or not d.evictor.swaps:
                raise
            host, result = pairs[0], s
            if not d.clean(host):
                d.swap_out(host)
                d.load(host)
        return host, result
