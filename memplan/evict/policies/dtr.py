"""`dtr`: Dynamic Tensor Rematerialization (Kirisame et al. 2021), a published policy that `auto` starts from.

It has no knowledge of later ops: ops run in order, and when an allocation does not fit, the storage with the smallest
h is dropped, to be recomputed when it is needed. `dtr` counts bytes, as the paper does; with another `memory`,
every storage may have an address, so that free memory can be fragmented. Random ops are not run again, so
what depends on their results is dropped only while those are there; host-resident storages stay once they are loaded.

`on_demand` does so too, but the step is known here, so the time until the next use takes the place of the time
since the last (Belady 1966). An exponent weighs the time of recomputing: with a smaller one the step tends to take
longer, and may need fewer bytes where blocks run several times. `auto` starts from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from memplan.errors import BudgetInfeasible
from memplan.evict.measure import Ints, flat, measure
from memplan.evict.measure_kernel import DROPPED, RELEASED, THERE, seconds_around
from memplan.evict.simulator import (
    MOST_RUNS,
    ByteCounter,
    EvictionKind,
    Location,
    SimulatedDevice,
    SimulatedMemory,
)
from memplan.evict.workload import Events, Workload

_LOST = {Location.GONE: DROPPED, Location.DEAD: RELEASED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The properties of a storage that a heuristic may use.

    `size` is in bytes, `seconds` is the time to compute it, `around` that of the dropped storages around it (those that
    it is computed from, and those computed from it), `staleness` the time since its last touch, `ahead` the time until
    its next use if nothing is recomputed, all in seconds.
    """

    storage: int
    size: int
    seconds: float
    around: float
    staleness: float
    ahead: float


Heuristic = Callable[[Candidate], float]  # the storage with the smallest value is dropped


def h_dtr(candidate: Candidate) -> float:
    """Return the paper's h: cost / (size x staleness), where the cost includes the dropped neighbourhood."""
    worth = candidate.size * candidate.staleness
    return (candidate.seconds + candidate.around) / worth if worth > 0 else float("inf")


def dtr(
    workload: Workload,
    *,
    heuristic: Heuristic = h_dtr,
    most_runs: int = MOST_RUNS,
    memory: SimulatedMemory | None = None,
) -> Events:
    """Return events that keep the budget, in `memory` of that size (default: bytes without addresses).

    Raises `BudgetInfeasible` when an op's operands do not fit, or when the ops would run more than `most_runs` times on
    average.
    """
    memory = memory or ByteCounter(workload.budget)
    return SimulatedDevice(workload, memory, Dropper(workload, heuristic), most_runs=most_runs).simulate()


class Dropper:
    """The evictor that drops the storage with the smallest value of the heuristic."""

    swaps = False

    def __init__(self, workload: Workload, heuristic: Heuristic) -> None:
        self._heuristic = heuristic
        self.around = Neighbourhoods(workload)

    def choose(self, device: SimulatedDevice, candidates: Sequence[int]) -> int:
        """Return the candidate with the smallest value; of equal ones, the first storage."""
        clock, now = device.workload.clock, device.workload.clock[device.position]
        around = self.around.seconds(device, candidates)
        priced = []
        for s, seconds in zip(candidates, around, strict=True):
            candidate = Candidate(
                storage=s,
                size=device.workload.size[s],
                seconds=device.seconds[s],
                around=seconds,
                staleness=device.clock - device.touched[s],
                ahead=clock[device.next_use(s)] - now,
            )
            priced.append((self._heuristic(candidate), s))
        return min(priced)[1]

    def choose_kind(self, device: SimulatedDevice, storage: int) -> EvictionKind:
        return EvictionKind.DROP

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        self.around.changed(device, storage)


class Neighbourhoods:
    """The seconds of the dropped storages around each storage.

    These are the dropped storages that it is computed from, and those computed from it that have a later use, each
    directly or through other dropped storages.
    """

    def __init__(self, workload: Workload) -> None:
        count = len(workload.size)
        made_from: list[dict[int, None]] = [{} for _ in range(count)]
        makes: list[dict[int, None]] = [{} for _ in range(count)]
        for reads, writes in zip(workload.reads, workload.writes, strict=True):
            for s in writes:
                for r in reads:
                    if r != s:
                        made_from[s][r] = makes[r][s] = None
        self._edges = (*flat(list(map(tuple, made_from))), *flat(list(map(tuple, makes))))
        self._lost = np.full(count, THERE, np.int64)
        self._costs: tuple[npt.NDArray[np.float64], Ints] | None = None  # seconds and last use of each storage

    def seconds(self, device: SimulatedDevice, storages: Sequence[int]) -> list[float]:
        """Return the seconds of the dropped neighbourhood of each of `storages`, without the storage itself."""
        if self._costs is None:
            self._costs = np.array(device.seconds, np.float64), np.array(device.last, np.int64)
        around = seconds_around(np.array(storages, np.int64), self._lost, *self._edges, *self._costs, device.position)
        found: list[float] = around.tolist()
        return found

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        """Take note of where `storage` is now."""
        self._lost[storage] = _LOST.get(device.where[storage], THERE)


_EXPONENTS = (1.0, 0.5)
_MOST_RUNS = 6  # of each op on average


def h_ahead(candidate: Candidate, *, exponent: float = 1.0) -> float:
    """Return cost ** exponent / (size x time until the next use); the cost includes the dropped neighbourhood."""
    worth = candidate.size * candidate.ahead
    return float((candidate.seconds + candidate.around) ** exponent / worth) if worth > 0 else float("inf")


def on_demand(workload: Workload) -> Iterator[Events]:
    """Yield the events of on-demand eviction by `h_ahead` that keep the budget; they recompute, and copy nothing."""
    for exponent in _EXPONENTS:
        with suppress(BudgetInfeasible):
            events = dtr(workload, heuristic=partial(h_ahead, exponent=exponent), most_runs=_MOST_RUNS)
            if measure(workload, events).peak <= workload.budget:
                yield events
