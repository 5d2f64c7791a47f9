"""Simulates a step op by op under a budget, as a runtime that evicts on demand would run it.

An operand that is absent is recomputed, recursively, or reloaded. A storage is released after its last use, and may be
recomputed after that as the source of another recompute.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events, Kind
from memplan.evict.simulator.device_state import DeviceState, Evictor, Location
from memplan.evict.simulator.memory import SimulatedMemory
from memplan.evict.workload import Workload

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
