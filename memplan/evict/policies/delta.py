"""`delta`: DELTA (Tang et al. 2022), a published policy that `auto` is compared with and falls back to.

It evicts on demand, like DTR, with two functions: the *filter* selects the storage to release, the *director* decides
whether it is swapped or recomputed. Copies are then overlapped with ops, in place of DELTA's prefetching.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memplan.evict.measure import overlapped
from memplan.evict.policies.dtr import Dropper, Heuristic, h_dtr
from memplan.evict.simulator import ByteCounter, EvictionKind, Location, SimulatedDevice
from memplan.evict.workload import Events, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The times, in seconds, of a storage that the filter selected.

    `recompute`: to recompute it, dropped sources included. `out`: until a copy to the host that starts at its last
    touch is complete. `back`: to copy it back, after the reloads that are needed before it. `gap`: until its next use.
    """

    recompute: float
    out: float
    back: float
    gap: float


Director = Callable[[Released], EvictionKind]


def direct(released: Released) -> EvictionKind:
    """Return TO_HOST where the stall is shorter than the recompute, else DROP: the default director.

    The stall is the rest of the copy out, and what the gap does not hide of the copy back.
    """
    visible = released.out + max(0.0, released.back - released.gap)
    return EvictionKind.SWAP if visible < released.recompute else EvictionKind.DROP


def delta(workload: Workload, *, filter: Heuristic = h_dtr, director: Director = direct) -> Events:
    """Return events that keep the budget. Raises `BudgetInfeasible` when an op's operands do not fit."""
    simulator = SimulatedDevice(workload, ByteCounter(workload.budget), _Delta(workload, filter, director))
    return overlapped(workload, simulator.simulate())


class _Delta(Dropper):
    """The evictor that asks the filter and the director."""

    swaps = True

    def __init__(self, workload: Workload, choose: Heuristic, director: Director) -> None:
        super().__init__(workload, choose)
        self._director = director
        self._away: set[int] = set()
        self._copied: set[int] = set(workload.host_resident)
        self._busy = 0.0  # the time until which the link to the host is in use

    def choose_kind(self, device: SimulatedDevice, storage: int) -> EvictionKind:
        w, by = device.workload, device.next_use(storage)
        released = Released(
            recompute=device.seconds[storage] + self.around.seconds(device, [storage])[0],
            out=0.0 if device.clean[storage] else max(0.0, self._left(device, storage) - device.clock),
            back=w.to_device[storage] + sum(w.to_device[s] for s in self._away if device.next_use(s) <= by),
            gap=w.clock[by] - w.clock[device.position],
        )
        return self._director(released)

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        super().changed(device, storage)
        self._away.discard(storage)
        if device.where[storage] is Location.AWAY:
            self._away.add(storage)
            if storage not in self._copied:
                self._busy = self._left(device, storage)
            self._copied.add(storage)

    def _left(self, device: SimulatedDevice, storage: int) -> float:
        """Return the time at which the storage's copy to the host is complete, after the copies before it."""
        return max(self._busy, device.touched[storage]) + device.workload.to_host[storage]
