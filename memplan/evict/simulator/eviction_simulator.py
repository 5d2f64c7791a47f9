"""A step walked op by op under a budget: the runtime that policies which evict on demand simulate.

What is absent when an op needs it is computed again, recursively, or reloaded. A storage is released at its last use,
as a program would, and may be computed again after that for another's sake.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events, Kind
from memplan.evict.simulator.device_state import DeviceState, Evictor, Location
from memplan.evict.simulator.memory import SimulatedMemory
from memplan.evict.workload import Workload

_PATIENCE = 40  # runs per op, on average, before a policy is said to go round in circles


class EvictionSimulator:
    """Ops and their operands on a device; `walk()` goes through the step once."""

    def __init__(self, workload: Workload, memory: SimulatedMemory, evictor: Evictor) -> None:
        self.workload = workload
        self.device = DeviceState(workload, memory, evictor)
        self._runs = 0

    def walk(self) -> Events:
        """The events of the step. Raises `BudgetInfeasible` when an op's operands cannot be had."""
        for i in range(len(self.workload.graph.ops)):
            self.device.position = i
            if i == self.workload.graph.forward_ops:
                self._deliver()
            self._turn(i)
        return tuple(self.device.events)

    # -- ops ---------------------------------------------------------------------------------------------

    def _turn(self, i: int) -> None:
        w, d = self.workload, self.device
        fresh = {s for s in w.writes[i] if s not in d.given and w.writers[s][0] == i}
        operands = [s for s in dict.fromkeys((*w.reads[i], *w.writes[i])) if s not in fresh]
        d.hold(operands)
        for s in operands:
            self._have(s)
        self._execute(i, again=False)
        d.let_go(operands)
        for s in (*operands, *fresh):
            if d.last[s] == i and d.where[s] is Location.HERE:
                d.release(s)

    def _deliver(self) -> None:
        """The forward is over: what it changed of the caller's goes home."""
        d = self.device
        for s in sorted(self.workload.due):
            if d.where[s] is Location.HERE and not d.clean(s):
                d.swap_out(s)

    def _have(self, storage: int) -> None:
        """Bring a storage to the device, and before it what it is made from."""
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
                self._execute(i, again=True)

    def _execute(self, i: int, *, again: bool) -> None:
        """Run op i, whose operands are here, in bytes that are found for its results."""
        w, d = self.workload, self.device
        first = [s for s in w.writes[i] if s not in d.given and w.writers[s][0] == i]
        new = [s for s in first if (self._is_wanted(s) if again else d.where[s] is Location.NEVER)]
        lost = [s for s in first if s not in new]  # written once more, to be thrown away
        whole = not again or all(len(w.writers[s]) == 1 for s in new)  # no later writer wants the same inputs
        host, result = self._takeover(i, new) if whole else (-1, -1)
        for s in new:
            if s != result:
                host, result = self._room_for(i, s, host, result)
        for s in lost:
            d.take(~s, w.size[s])
        for s in [s for s in lost if again and self._is_wanted(s)]:  # dropped just now, to make room
            d.give(~s, w.size[s])
            d.take(s, w.size[s])
            lost.remove(s)
            new.append(s)
        d.hold(new)
        d.emit(Kind.RUN, i)
        self._runs += 1
        if self._runs > _PATIENCE * len(w.graph.ops) + 1000:
            raise d.infeasible(f"it runs {_PATIENCE} ops for each one of the step, and would for ever")
        d.clock += w.seconds[i]
        if result >= 0:
            d.hand_over(host, result)
        for s in lost:
            d.give(~s, w.size[s])
        d.touch(i, again=again)
        d.let_go(new)
        for s in new:
            d.appear(s)

    def _is_wanted(self, s: int) -> bool:
        """Whether what is made again takes the place of what was dropped."""
        return self.device.where[s] is Location.GONE and self.device.position <= self.device.limit[s]

    def _takeover(self, i: int, new: Sequence[int]) -> tuple[int, int]:
        """(input, result): the result that takes the bytes of an input that no one needs any more; -1, -1: none."""
        d = self.device
        for result, host in self.workload.pairs[i]:
            free = d.held_once(host) and d.where[host] is Location.HERE
            if result in new and free and d.next_use(host) >= len(self.workload.graph.ops):
                return host, result
        return -1, -1

    def _room_for(self, i: int, s: int, host: int, result: int) -> tuple[int, int]:
        """Bytes for a new `s`; in those of an input that goes to the host, where there is no other way."""
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
