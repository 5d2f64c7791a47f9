"""Measures a sequence of events exactly: bytes by step, seconds, stalls. Moves its copies to overlap with ops.

A workload is turned into flat arrays for this, since the compiled kernels run thousands of times while a policy
searches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.errors import InvalidEviction
from memplan.evict.workload import Event, Events, Kind, Workload

Ints = npt.NDArray[np.int64]
_NO_LIMIT = 2**63 - 1  # bytes


@dataclass(frozen=True, kw_only=True)
class MeasuredEvents:
    """The measured cost of a sequence of events: bytes and seconds.

    `live[k]` are the arena bytes at the k-th event that becomes an op (every kind but DROP); `area` is the sum over
    steps of the bytes above the budget, on the device and on the host; `stall` the seconds that the step waits for
    copies.
    """

    peak: int
    seconds: float
    stall: float
    area: float
    live: Ints


class WorkloadArrays:
    """The arrays of a workload. Lists of lists are a pointer array and a flat array (`ptr[i]:ptr[i + 1]`)."""

    def __init__(self, workload: Workload) -> None:
        w = self.workload = workload
        self.read_ptr, self.read = flat(w.reads)
        self.write_ptr, self.write = flat(w.writes)
        self.size = np.array(w.size, np.int64)
        self.writer_ptr, self.writer = flat([ops if s in w.held else () for s, ops in enumerate(w.writers)])
        self.use_ptr, self.use = flat([ops if s in w.held else () for s, ops in enumerate(w.uses)])
        self.seconds = np.array(w.seconds, np.float64)
        self.to_host = np.array(w.to_host, np.float64)
        self.to_device = np.array(w.to_device, np.float64)
        self.pair_ptr, self.pair = flat([[x for pair in op for x in pair] for op in w.pairs])
        self.host_resident = np.zeros(len(w.size), np.int64)
        self.host_resident[list(w.host_resident - w.fresh)] = 1
        self.begun = np.array(w.begun, np.int64)
        self.copy_size = self.size.copy()  # of a copy on the host that the step makes
        self.copy_size[list(w.host_resident)] = 0
        self.host_budget = np.int64(_NO_LIMIT if w.host_budget is None else w.host_budget)
        self.redo_until = np.array(w.redo_until, np.int64)
        self.seconds_on_host = np.array(w.seconds_on_host, np.float64)
        self.awaited = np.array(w.awaited, np.int64)

    @cached_property
    def tables(self) -> tuple[Any, ...]:
        """The arguments of `measure_kernel.measure`, in its order."""
        return (
            *(self.read_ptr, self.read, self.write_ptr, self.write, self.writer_ptr, self.writer, self.size),
            *(self.pair_ptr, self.pair, self.host_resident, self.seconds, self.to_host, self.to_device),
            *(self.begun, self.copy_size, self.host_budget, self.workload.costs.launch),
            *(self.seconds_on_host, self.awaited),
        )

    def measure(self, kinds: Ints, indices: Ints) -> MeasuredEvents | None:
        """Return the cost of these events; None when one of them is impossible."""
        from memplan.evict.measure_kernel import measure

        code, peak, seconds, stall, area, live = measure(kinds, indices, self.workload.budget, *self.tables)
        if code >= 0:
            return None
        return MeasuredEvents(peak=int(peak), seconds=float(seconds), stall=float(stall), area=float(area), live=live)


def to_arrays(events: Sequence[Event]) -> tuple[Ints, Ints]:
    """Return the kinds and indices of `events`. Raises `InvalidEviction` if they are not a sequence of events."""
    try:
        pairs = np.array(events, np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError) as error:
        what = "the policy did not return a sequence of events"
        raise InvalidEviction(what, where="events", hint="return (kind, index) pairs") from error
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def to_events(kinds: Ints, indices: Ints) -> Events:
    """Return the events of `kinds` and `indices`; the inverse of `to_arrays`."""
    return tuple(Event(Kind(k), i) for k, i in zip(kinds.tolist(), indices.tolist(), strict=True))


def measure(workload: Workload, events: Sequence[Event]) -> MeasuredEvents:
    """Return the cost of `events`. Raises `InvalidEviction` when one of them is impossible (`apply` says why)."""
    found = WorkloadArrays(workload).measure(*to_arrays(events))
    if found is None:
        raise InvalidEviction(
            "an event needs bytes that are not there", where="events", hint="apply(workload, events) names it"
        )
    return found


def flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return lists as a pointer array and a flat array: list i is `flat[ptr[i]:ptr[i + 1]]`."""
    ptr = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(one) for one in lists], out=ptr[1:])
    return ptr, np.array([x for one in lists for x in one], np.int64)


Leads = Mapping[tuple[int, int], float]
_NONE: Leads = MappingProxyType({})


def overlapped(workload: Workload, events: Sequence[Event], leads: Leads = _NONE) -> Events:
    """Return the same ops and evictions with their copies moved to overlap with ops; never slower or above the budget.

    An offload starts at the storage's last touch, and its bytes are freed when the copy is predicted to be complete, or
    when they are needed. A reload starts early enough to be complete when it is waited for, as far as its bytes fit;
    `leads` maps (storage, number of its earlier reloads) to the seconds by which that copy starts earlier than the
    costs suggest. Events that exceed the budget, or that are impossible, are returned unchanged.
    """
    from memplan.evict.measure_kernel import prefetch

    arrays = WorkloadArrays(workload)
    before = arrays.measure(*to_arrays(events))
    if before is None or before.peak > workload.budget:
        return tuple(events)
    bare, border = _without_waits(workload, events)
    earlier, ahead = Counter[int](), np.zeros(len(bare))
    for position, (kind, s) in enumerate(bare):
        if kind is Kind.RELOADED:
            ahead[position] = leads.get((s, earlier[s]), 0.0)
            earlier[s] += 1
    bound = np.zeros(len(workload.size), np.int64)
    bound[list(workload.late | workload.due)] = 1
    moved = prefetch(*to_arrays(bare), workload.budget, arrays.tables, ahead, bound, border)
    after = arrays.measure(*moved)
    if after is None or max(after.peak - workload.budget, after.area - before.area, after.seconds - before.seconds) > 0:
        return tuple(events)
    return to_events(*moved)


def _without_waits(workload: Workload, events: Sequence[Event]) -> tuple[Events, int]:
    """Return the events with each OFFLOAD at its storage's last touch, a RELOADED for each reload, and no other waits.

    The second result is the position of the event with which the backward begins.
    """
    border = workload.border(tuple(events))
    found: list[list[Event]] = []
    touched: dict[int, int] = {}
    first = 0
    for position, (kind, index) in enumerate(events):
        first = len(found) if position <= border else first
        if kind is Kind.OFFLOAD:
            found[touched[index]].append(Event(kind, index))
        elif kind not in (Kind.OFFLOADED, Kind.RELOAD):
            uses = (*workload.reads[index], *workload.writes[index]) if kind is Kind.RUN else (index,)
            touched.update(dict.fromkeys(uses, len(found)))
            found.append([Event(kind, index)])
    if border >= len(events):
        first = len(found)
    return tuple(event for group in found for event in group), sum(map(len, found[:first]))
