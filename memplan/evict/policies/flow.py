"""`flow`: offloads the storage whose next use is furthest away (Belady 1966), and recomputes nothing.

torch.TensorRef names this policy without an implementation. When an allocation does not fit, the storage whose next use
is furthest away is offloaded, without a copy when the host has its bytes already; then copies are overlapped with ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies.genoa import genoa
from memplan.evict.simulator import ByteCounter, DeviceState, EvictionKind, EvictionSimulator
from memplan.evict.workload import Events, Workload, require_floor


class _Furthest:
    """The evictor that offloads the storage whose next use is furthest away."""

    swaps = True

    def choose(self, device: DeviceState, candidates: Sequence[int]) -> int:
        return max(candidates, key=lambda s: (device.next_use(s), -s))

    def choose_kind(self, device: DeviceState, storage: int) -> EvictionKind:
        return EvictionKind.SWAP

    def changed(self, device: DeviceState, storage: int) -> None:
        pass


def flow(workload: Workload) -> Events:
    """Return events within the budget: Belady's or those of `genoa`, whichever are faster or exist at all.

    Raises `BudgetInfeasible` below the floor.
    """
    require_floor(workload)
    found = [overlapped(workload, genoa(workload))]
    with suppress(BudgetInfeasible):
        found.insert(
            0, overlapped(workload, EvictionSimulator(workload, ByteCounter(workload.budget), _Furthest()).simulate())
        )
    return min(found, key=lambda events: measure(workload, events).seconds)
