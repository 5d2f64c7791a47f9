"""`flow` and `genoa`, policies of torch.TensorRef, which named the first without an implementation.

`flow` recomputes nothing: when an allocation does not fit, the storage whose next use is furthest away (Belady 1966) is
offloaded, without a copy when the host has its bytes already; then copies are overlapped with ops.

`genoa` reloads each operand right before its op and offloads it right after. It is the slowest policy and has the
smallest peak: no plan needs less than one op's operands and results. Budgets are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure, overlapped
from memplan.evict.simulator import ByteCounter, EvictionKind, SimulatedDevice
from memplan.evict.workload import Event, Events, Kind, Workload, require_floor


class _Furthest:
    """The evictor that offloads the storage whose next use is furthest away."""

    swaps = True

    def choose(self, device: SimulatedDevice, candidates: Sequence[int]) -> int:
        return max(candidates, key=lambda s: (device.next_use(s), -s))

    def choose_kind(self, device: SimulatedDevice, storage: int) -> EvictionKind:
        return EvictionKind.SWAP

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        pass


def flow(workload: Workload) -> Events:
    """Return events within the budget: Belady's or those of `genoa`, whichever are faster or exist at all.

    Raises `BudgetInfeasible` below the floor.
    """
    require_floor(workload)
    found = [overlapped(workload, genoa(workload))]
    with suppress(BudgetInfeasible):
        found.insert(
            0, overlapped(workload, SimulatedDevice(workload, ByteCounter(workload.budget), _Furthest()).simulate())
        )
    return min(found, key=lambda events: measure(workload, events).seconds)


def genoa(workload: Workload) -> Events:
    """Return events whose peak is the floor of `workload`. Raises `BudgetInfeasible` for a budget below it."""
    require_floor(workload)
    events: list[Event] = []
    for i in range(len(workload.graph.ops)):
        reads, writes = workload.reads[i], workload.writes[i]
        for s in dict.fromkeys((*reads, *writes)):
            if workload.uses[s][0] < i or s in workload.host_resident - workload.fresh:
                events += [Event(Kind.RELOAD, s), Event(Kind.RELOADED, s)]
        events.append(Event(Kind.RUN, i))
        for s in dict.fromkeys((*writes, *reads)):
            wanted = workload.uses[s][-1] > i
            if s in writes and (wanted or s in workload.host_resident):
                events += [Event(Kind.OFFLOAD, s), Event(Kind.OFFLOADED, s)]
            elif wanted or s in workload.host_resident:
                events.append(Event(Kind.DROP, s))
    return tuple(events)
