"""A step walked op by op under a budget: the runtime that policies which evict on demand simulate.

What is on the device is known at every moment. When bytes are wanted that are not free, the policy names a storage
to give up and says how; what is absent when an op needs it is computed again, recursively, or reloaded. A storage is
released at its last use, as a program would, and may be computed again after that for another's sake.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from memplan.errors import BudgetInfeasible
from memplan.evict.again import limits
from memplan.evict.events import Event, Events, Kind
from memplan.evict.floor import floor
from memplan.evict.memory import Memory
from memplan.evict.workload import Workload

_PATIENCE = 40  # runs per op, on average, before a policy is said to go round in circles


class Where(enum.Enum):
    """Where a storage is."""

    NEVER = "not yet made"
    HERE = "on the device"
    DEAD = "released after its last use"
    GONE = "dropped"
    AWAY = "on the host"


class Way(enum.Enum):
    """How bytes are given up."""

    DROP = "compute it again"
    SWAP = "copy it to the host and back"


class Evictor(Protocol):
    """A policy on demand."""

    swaps: bool

    def choose(self, walk: Walk, candidates: Sequence[int]) -> int:
        """The storage to give up next, one of `candidates` (never empty)."""
        ...

    def way(self, walk: Walk, storage: int) -> Way:
        """How; asked only where both are possible."""
        ...

    def changed(self, walk: Walk, storage: int) -> None:
        """Told whenever a storage comes or goes."""
        ...


class Walk:
    """The state of the device; `walk()` goes through the step once. `position` is the op whose turn it is."""

    def __init__(self, workload: Workload, memory: Memory, evictor: Evictor) -> None:
        self.workload, self.memory, self.evictor = workload, memory, evictor
        count = len(workload.size)
        self._given = workload.streamed - workload.fresh
        self.where = [Where.AWAY if s in self._given else Where.NEVER for s in range(count)]
        self.limit = limits(workload)
        self.last = [uses[-1] if uses else -1 for uses in workload.uses]
        self.touched = [0.0] * count
        self.clock = 0.0
        self.position = 0
        self.events: list[Event] = []
        self._clean = [s in self._given for s in range(count)]  # the host has the same bytes
        self._locks = [0] * count
        self._here: dict[int, None] = {}
        self._runs = 0

    def walk(self) -> Events:
        """The events of the step. Raises `BudgetInfeasible` when an op's operands cannot be had."""
        for i in range(len(self.workload.graph.ops)):
            self.position = i
            if i == self.workload.graph.forward_ops:
                self._deliver()
            self._turn(i)
        return tuple(self.events)

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

    # -- ops ---------------------------------------------------------------------------------------------

    def _turn(self, i: int) -> None:
        w = self.workload
        fresh = {s for s in w.writes[i] if s not in self._given and w.writers[s][0] == i}
        operands = [s for s in dict.fromkeys((*w.reads[i], *w.writes[i])) if s not in fresh]
        self._hold(operands)
        for s in operands:
            self._have(s)
        self._execute(i, again=False)
        self._let_go(operands)
        for s in (*operands, *fresh):
            if self.last[s] == i and self.where[s] is Where.HERE:
                self._release(s)

    def _deliver(self) -> None:
        """The forward is over: what it changed of the caller's goes home."""
        for s in sorted(self.workload.due):
            if self.where[s] is Where.HERE and not self._clean[s]:
                self._swap_out(s)

    def _have(self, storage: int) -> None:
        """Bring a storage to the device, and before it what it is made from."""
        stack = [storage]
        held: dict[int, tuple[int, ...]] = {}
        while stack:
            top = stack[-1]
            if self.where[top] is Where.AWAY:
                self._load(top)
            if self.where[top] is Where.HERE:
                self._let_go(held.pop(top, ()))
                stack.pop()
                continue
            if self.where[top] is Where.NEVER or self.position > self.limit[top]:
                raise self._infeasible(f"{self.workload.graph.storages[top].name} cannot be made again")
            if top not in held:
                reads = (r for i in self.workload.writers[top] for r in self.workload.reads[i] if r != top)
                held[top] = tuple(dict.fromkeys(reads))
                self._hold(held[top])
            missing = next((r for r in held[top] if self.where[r] is not Where.HERE), None)
            if missing is not None:
                stack.append(missing)
                continue
            self._drop(top)
            for i in self.workload.writers[top]:
                self._execute(i, again=True)

    def _execute(self, i: int, *, again: bool) -> None:
        """Run op i, whose operands are here, in bytes that are found for its results."""
        w = self.workload
        first = [s for s in w.writes[i] if s not in self._given and w.writers[s][0] == i]
        was = Where.GONE if again else Where.NEVER
        new = [s for s in first if self.where[s] is was and not (again and self.position > self.limit[s])]
        lost = [s for s in first if s not in new]  # written once more, to be thrown away
        whole = not again or all(len(w.writers[s]) == 1 for s in new)  # no later writer wants the same inputs
        host, result = self._takeover(i, new) if whole else (-1, -1)
        for s in new:
            if s != result:
                host, result = self._room_for(i, s, host, result)
        for s in lost:
            self._take(~s, w.size[s])
        self._hold(new)
        self._emit(Kind.RUN, i)
        self._runs += 1
        if self._runs > _PATIENCE * len(w.graph.ops) + 1000:
            raise self._infeasible(f"it runs {_PATIENCE} ops for each one of the step, and would for ever")
        self.clock += w.seconds[i]
        if result >= 0:
            self._hand_over(host, result)
        for s in lost:
            self._give(~s, w.size[s])
        for s in (*w.reads[i], *w.writes[i]):
            self.touched[s] = self.clock
        for s in w.writes[i]:
            self._clean[s] = self._clean[s] and again
        self._let_go(new)
        for s in new:
            self._here[s] = None
            self._move(s, Where.HERE)

    def _takeover(self, i: int, new: Sequence[int]) -> tuple[int, int]:
        """(input, result): the result that takes the bytes of an input that no one needs any more; -1, -1: none."""
        for result, host in self.workload.pairs[i]:
            free = self._locks[host] == 1 and self.where[host] is Where.HERE
            if result in new and free and self.next_use(host) >= len(self.workload.graph.ops):
                return host, result
        return -1, -1

    def _room_for(self, i: int, s: int, host: int, result: int) -> tuple[int, int]:
        """Bytes for a new `s`; in those of an input that goes to the host, where there is no other way."""
        try:
            self._take(s, self.workload.size[s])
        except BudgetInfeasible:
            pairs = [h for r, h in self.workload.pairs[i] if r == s and self._locks[h] == 1]
            if result >= 0 or not pairs or not self.evictor.swaps:
                raise
            host, result = pairs[0], s
            if not self._clean[host]:
                self._swap_out(host)
                self._load(host)
        return host, result

    def _hand_over(self, host: int, result: int) -> None:
        """After the op ran in place: the input is no longer there."""
        self.memory.hand_over(host, result)
        self._here.pop(host)
        if self.next_use(host) < len(self.workload.graph.ops):
            self._emit(Kind.DROP, host)
            self._move(host, Where.AWAY)
        else:
            self._move(host, Where.DEAD)

    # -- bytes -------------------------------------------------------------------------------------------

    def _take(self, key: int, size: int) -> None:
        """Bytes for `key`, whatever must go for them."""
        while size and not self.memory.take(key, size):
            candidates = [s for s in self._here if not self._locks[s] and self.workload.size[s] and self._ways(s)]
            if not candidates:
                raise self._infeasible("nothing is left to be given up")
            s = self.evictor.choose(self, candidates)
            ways = self._ways(s)
            way = ways[0] if len(ways) == 1 else self.evictor.way(self, s)
            if way is Way.DROP:
                self._drop(s)
            else:
                self._swap_out(s)

    def _ways(self, s: int) -> tuple[Way, ...]:
        """How it can be given up now."""
        made = self.workload.writers[s] and self.workload.writers[s][-1] <= self.position
        ways = [Way.DROP] if made and self.limit[s] >= max(self.last[s], self.position) else []
        free = s in self.workload.streamed and self.last[s] <= self.position
        return (*ways, Way.SWAP) if self.evictor.swaps or free else tuple(ways)

    def _give(self, key: int, size: int) -> None:
        if size:
            self.memory.give(key)

    def _release(self, s: int) -> None:
        """After its last use."""
        if s in self.workload.streamed:
            self._swap_out(s)
            return
        self._give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, Where.DEAD)

    def _drop(self, s: int) -> None:
        if self.where[s] is Where.GONE:
            return
        self._emit(Kind.DROP, s)
        if self.where[s] is Where.HERE:
            self._give(s, self.workload.size[s])
            self._here.pop(s)
        self._move(s, Where.GONE)

    def _swap_out(self, s: int) -> None:
        if self._clean[s]:
            self._emit(Kind.DROP, s)
        else:
            self._emit(Kind.OFFLOAD, s)
            self._emit(Kind.OFFLOADED, s)
        self._clean[s] = True
        self._give(s, self.workload.size[s])
        self._here.pop(s)
        self._move(s, Where.AWAY)

    def _load(self, s: int) -> None:
        self._take(s, self.workload.size[s])
        self._emit(Kind.RELOAD, s)
        self._emit(Kind.RELOADED, s)
        self._here[s] = None
        self.touched[s] = self.clock
        self._move(s, Where.HERE)

    # -- small things ------------------------------------------------------------------------------------

    def _move(self, s: int, where: Where) -> None:
        self.where[s] = where
        self.evictor.changed(self, s)

    def _hold(self, storages: Sequence[int]) -> None:
        for s in storages:
            self._locks[s] += 1

    def _let_go(self, storages: Sequence[int]) -> None:
        for s in storages:
            self._locks[s] -= 1

    def _emit(self, kind: Kind, index: int) -> None:
        self.events.append(Event(kind, index))

    def _infeasible(self, why: str) -> BudgetInfeasible:
        least, at = floor(self.workload)
        ops = self.workload.graph.ops
        return BudgetInfeasible(
            f"does not fit in {self.workload.budget} bytes this way: {why}",
            op=ops[at].name,
            smallest=least,
            where=f"op {ops[self.position].name}",
            hint=f"policy='auto' finds more ways; no plan needs less than {least} bytes (op {ops[at].name})",
        )
