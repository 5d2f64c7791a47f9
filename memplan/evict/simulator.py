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

    def choose(self, device: SimulatedDevice, candidates: Sequence[int]) -> int:
        """Return the storage to evict next, one of `candidates` (never empty)."""
        ...

    def choose_kind(self, device: SimulatedDevice, storage: int) -> EvictionKind:
        """Return how to evict `storage`; called only where both kinds are possible."""
        ...

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        """Take note that the location of `storage` has changed."""
        ...


MOST_RUNS = 40  # of each op on average; a policy that exceeds it is taken to recompute without end


class SimulatedDevice:
    """A simulated run of a workload; `simulate()` runs the step once.

    `position` is the op that runs now or next, `clock` the seconds of the ops that ran. `given` are the caller's
    storages; `clean[s]`: the host has the same bytes; `seconds[s]` are those of the ops that write a storage. Storages
    that are held (`_hold`) are not evicted.
    """

    def __init__(
        self, workload: Workload, memory: SimulatedMemory, evictor: Evictor, *, most_runs: int = MOST_RUNS
    ) -> None:
        self.workload, self.memory, self.evictor, self._most_runs = workload, memory, evictor, most_runs
        count = len(workload.size)
        self.given = workload.host_resident - workload.fresh
        self.where = [Location.AWAY if s in self.given else Location.NEVER for s in range(count)]
        self.clean = [s in self.given for s in range(count)]
        self.limit = limits(workload)
        self.last = [uses[-1] if uses else -1 for uses in workload.uses]
        self.seconds = [sum(workload.seconds[i] for i in writers) for writers in workload.writers]
        self.touched = [0.0] * count
        self.clock = 0.0
        self.position = 0
        self._events: list[Event] = []
        self._locks = [0] * count
        self._left = set[int]()  # those away whose bytes on the device were given up, as the host had them already
        self._here: dict[int, None] = {}
        self._runs = 0

    def simulate(self) -> Events:
        """Return the events of the step. Raises `BudgetInfeasible` when an op's operands do not fit."""
        for i in range(len(self.workload.graph.ops)):
            self.position = i
            for s in sorted(self.workload.due) if i == self.workload.graph.forward_ops else ():
                if self.where[s] is Location.HERE and not self.clean[s]:
                    self._swap_out(s)  # the forward changed it
            self._run_op(i)
        return tuple(self._events)

    def next_use(self, storage: int) -> int:
        """Return the next op after the current one that uses the storage; the number of ops if there is none."""
        uses = self.workload.uses[storage]
        at = bisect_right(uses, self.position)
        return uses[at] if at < len(uses) else len(self.workload.graph.ops)

    # -- ops ---------------------------------------------------------------------------------------------

    def _run_op(self, i: int) -> None:
        """Run op i for the first time: bring its operands to the device, then release what had its last use."""
        w = self.workload
        fresh = {s for s in w.writes[i] if s not in self.given and w.writers[s][0] == i}
        operands = [s for s in dict.fromkeys((*w.reads[i], *w.writes[i])) if s not in fresh]
        self._hold(operands)
        for s in operands:
            self._bring(s)
        self._execute(i, recompute=False)
        self._hold(operands, -1)
        for s in (*operands, *fresh):
            if self.last[s] != i or self.where[s] is not Location.HERE:
                continue
            if s in w.host_resident:
                self._swap_out(s)
            else:
                self._leave(s, Location.DEAD)

    def _bring(self, storage: int) -> None:
        """Reload or recompute a storage, and before it the storages that it is computed from."""
        stack = [storage]
        held: dict[int, tuple[int, ...]] = {}
        while stack:
            top = stack[-1]
            if self.where[top] is Location.AWAY:
                self._take(top, self.workload.size[top])
                self._emit(Kind.RELOAD, Kind.RELOADED, of=top)
                self._left.discard(top)
                self.touched[top] = self.clock
                self._appear(top)
            if self.where[top] is Location.HERE:
                self._hold(held.pop(top, ()), -1)
                stack.pop()
                continue
            if self.where[top] is Location.NEVER or self.position > self.limit[top]:
                raise self._infeasible(f"{self.workload.graph.storages[top].name} cannot be made again")
            if top not in held:
                reads = (r for i in self.workload.writers[top] for r in self.workload.reads[i] if r != top)
                held[top] = tuple(dict.fromkeys(reads))
                self._hold(held[top])
            missing = next((r for r in held[top] if self.where[r] is not Location.HERE), None)
            if missing is not None:
                stack.append(missing)
                continue
            self._drop(top)
            for i in self.workload.writers[top]:
                self._execute(i, recompute=True)

    def _execute(self, i: int, *, recompute: bool) -> None:
        """Allocate bytes for the results of op i, whose operands are on the device, and run it."""
        w = self.workload
        first = [s for s in w.writes[i] if s not in self.given and w.writers[s][0] == i]
        new = [s for s in first if (self._is_wanted(s) if recompute else self.where[s] is Location.NEVER)]
        lost = [s for s in first if s not in new]  # written once more, and discarded
        whole = not recompute or all(len(w.writers[s]) == 1 for s in new)  # no later writer wants the same inputs
        host, result = self._takeover(i, new) if whole else (-1, -1)
        for s in new:
            if s != result:
                self._take(s, w.size[s])
        for s in lost:
            self._take(~s, w.size[s])
        for s in [s for s in lost if recompute and self._is_wanted(s)]:  # dropped just now, to make room
            self._give(~s, w.size[s])
            self._take(s, w.size[s])
            lost.remove(s)
            new.append(s)
        if not recompute:
            for s in w.begins[i]:
                self._take(s, w.aligned(s))
        self._hold(new)
        self._emit(Kind.RUN, of=i)
        self._runs += 1
        if self._runs > self._most_runs * len(w.graph.ops) + 1000:
            raise self._infeasible(f"it recomputes without end: over {self._most_runs} runs for each op of the step")
        self.clock += w.seconds[i]
        if result >= 0:
            self._hand_over(host, result)
        for s in lost:
            self._give(~s, w.size[s])
            if s in self._left:  # it is there again, and has a copy on the host
                self._emit(Kind.DROP, of=s)
        self._touch(i, recompute=recompute)
        self._hold(new, -1)
        for s in new:
            self._appear(s)

    def _touch(self, i: int, *, recompute: bool) -> None:
        """Record that op i has run: its storages were touched now, and the host's copies of its results are stale."""
        for s in (*self.workload.reads[i], *self.workload.writes[i]):
            self.touched[s] = self.clock
        for s in self.workload.writes[i]:
            self.clean[s] = self.clean[s] and recompute

    def _is_wanted(self, s: int) -> bool:
        """Return whether a recompute of `s` restores a storage that was dropped."""
        return self.where[s] is Location.GONE and self.position <= self.limit[s]

    def _takeover(self, i: int, new: Sequence[int]) -> tuple[int, int]:
        """Return (input, result) where the result can take the bytes of an input without a later use; -1, -1: none."""
        for result, host in self.workload.pairs[i]:
            free = self._locks[host] == 1 and self.where[host] is Location.HERE  # only the running op holds it
            if result in new and free and self.next_use(host) >= len(self.workload.graph.ops):
                return host, result
        return -1, -1

    # -- bytes -------------------------------------------------------------------------------------------

    def _take(self, key: int, size: int) -> None:
        """Allocate `size` bytes for `key`, and evict storages until they fit."""
        while size and not self.memory.take(key, size):
            candidates = [s for s in self._here if not self._locks[s] and self.workload.size[s] and self._ways(s)]
            if not candidates:
                raise self._infeasible("nothing is left to be given up")
            s = self.evictor.choose(self, candidates)
            ways = self._ways(s)
            kind = ways[0] if len(ways) == 1 else self.evictor.choose_kind(self, s)
            if kind is EvictionKind.DROP:
                self._drop(s)
            else:
                self._swap_out(s)

    def _ways(self, s: int) -> tuple[EvictionKind, ...]:
        """Return the ways in which a storage can be evicted now."""
        made = self.workload.writers[s] and self.workload.writers[s][-1] <= self.position
        ways = [EvictionKind.DROP] if made and self.limit[s] >= max(self.last[s], self.position) else []
        free = s in self.workload.host_resident and self.last[s] <= self.position
        return (*ways, EvictionKind.SWAP) if self.evictor.swaps or free else tuple(ways)

    def _give(self, key: int, size: int) -> None:
        """Free what `_take` allocated."""
        if size:
            self.memory.give(key)

    def _hand_over(self, host: int, result: int) -> None:
        """Move the bytes of input `host` to `result`, after an op that ran in place."""
        self.memory.hand_over(host, result)
        self._here.pop(host)
        self._move(host, Location.DEAD)

    def _drop(self, s: int) -> None:
        """Drop a storage, which can be recomputed."""
        if self.where[s] is Location.GONE:
            return
        self._emit(Kind.DROP, of=s)
        if self.where[s] is Location.HERE:
            self._leave(s, Location.GONE)
        else:
            self._move(s, Location.GONE)

    def _swap_out(self, s: int) -> None:
        """Offload a storage, without a copy where the host has the same bytes."""
        if self.clean[s]:
            self._emit(Kind.DROP, of=s)
            self._left.add(s)
        else:
            self._emit(Kind.OFFLOAD, Kind.OFFLOADED, of=s)
        self.clean[s] = True
        self._leave(s, Location.AWAY)

    def _leave(self, s: int, where: Location) -> None:
        self._give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, where)

    def _appear(self, s: int) -> None:
        self._here[s] = None
        self._move(s, Location.HERE)

    def _move(self, s: int, where: Location) -> None:
        self.where[s] = where
        self.evictor.changed(self, s)

    def _hold(self, storages: Sequence[int], count: int = 1) -> None:
        """Keep these storages from being evicted, or, with a count of -1, no longer."""
        for s in storages:
            self._locks[s] += count

    def _emit(self, *kinds: Kind, of: int) -> None:
        self._events += [Event(kind, of) for kind in kinds]

    def _infeasible(self, why: str) -> BudgetInfeasible:
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
