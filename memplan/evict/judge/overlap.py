"""Moves copies so that they overlap with ops: offloads start at the last use, reloads before the next one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from memplan.evict.events import Event, Events, Kind
from memplan.evict.judge.arrays import WorkloadArrays, to_arrays
from memplan.evict.workload import Workload

Leads = Mapping[tuple[int, int], float]
_NONE: Leads = MappingProxyType({})


def overlapped(workload: Workload, events: Sequence[Event]) -> Events:
    """Return the same ops and evictions with their copies started earlier; never slower, and never above the budget.

    An OFFLOAD moves to the storage's last touch, its OFFLOADED to where the copy is predicted to be complete, at the
    latest where it was. A RELOAD moves up by the time that its copy takes, as far as its bytes fit. Events that exceed
    the budget, or that are impossible, are returned unchanged.
    """
    arrays = WorkloadArrays(workload)
    best, figures = tuple(events), arrays.measure(*to_arrays(events))
    if figures is None or figures.peak > workload.budget:
        return best
    left = _start_offloads_earlier(workload, events)
    for found in (left, start_reloads_earlier(workload, left)):
        judged = arrays.measure(*to_arrays(found))
        if judged is not None and judged.peak <= workload.budget and judged.seconds < figures.seconds:
            best, figures = found, judged
    return best


def _start_offloads_earlier(workload: Workload, events: Sequence[Event]) -> Events:
    """Start each copy to the host at the last touch, and free its bytes when it is complete."""
    starts = _last_uses(workload, events)
    clock, free = 0.0, 0.0
    leaving: dict[int, float] = {}  # storage -> when its copy is complete; copies end in this order
    back = 0.0
    arrives: dict[int, float] = {}
    found: list[Event] = []
    for position, (kind, index) in enumerate(events):
        for s in [s for s, end in leaving.items() if end <= clock]:
            found.append(Event(Kind.OFFLOADED, s))
            del leaving[s]
        if kind is Kind.OFFLOADED:
            if index in leaving:
                clock = max(clock, leaving.pop(index))
                found.append(Event(kind, index))
        elif kind is not Kind.OFFLOAD:
            found.append(Event(kind, index))
            if kind is Kind.RUN:
                clock += workload.seconds[index]
            elif kind is Kind.RELOAD:
                arrives[index] = back = max(clock, back) + workload.to_device[index]
            elif kind is Kind.RELOADED:
                clock = max(clock, arrives[index])
        for s in starts.get(position, ()):
            leaving[s] = free = max(clock, free) + workload.to_host[s]
            found.append(Event(Kind.OFFLOAD, s))
    return tuple(found)


def _last_uses(workload: Workload, events: Sequence[Event]) -> dict[int, list[int]]:
    """Return, by event position, the storages whose next copy to the host can start right after that event."""
    touched: dict[int, int] = {}
    found: dict[int, list[int]] = {}
    for position, (kind, index) in enumerate(events):
        if kind is Kind.RUN:
            touched.update(dict.fromkeys((*workload.reads[index], *workload.writes[index]), position))
        elif kind is Kind.OFFLOAD:
            found.setdefault(touched[index], []).append(index)
        elif kind is Kind.RELOADED:
            touched[index] = position
    return found


def start_reloads_earlier(workload: Workload, events: Sequence[Event], leads: Leads = _NONE) -> Events:
    """Return the events with reloads started early enough to be complete when they are waited for.

    Reloads keep their order. None starts later than before, or earlier than its bytes fit. `leads` maps (storage,
    number of its earlier reloads) to the seconds by which that copy starts earlier than the costs suggest. Impossible
    events are returned unchanged.
    """
    figures = WorkloadArrays(workload).measure(*to_arrays(events))
    if figures is None:
        return tuple(events)
    steps = np.cumsum([kind is not Kind.DROP for kind, _ in events]) - 1  # the step of each event; DROP takes none
    live = figures.live.tolist()
    targets = _targets(workload, events, leads)
    gone: dict[int, int] = {}  # storage -> the event that freed its bytes
    earliest, border = 0, workload.border(tuple(events)) if workload.late else 0
    placed: dict[int, list[int]] = {}
    clock = _clock(workload, events)
    for position, (kind, s) in enumerate(events):
        if kind in (Kind.DROP, Kind.OFFLOADED):
            gone[s] = position
        if kind is not Kind.RELOAD:
            continue
        size, at = workload.size[s], position
        lowest = max(earliest, gone.get(s, -1) + 1, border if s in workload.late else 0)
        while at > lowest and clock[at] > targets[position]:
            step = steps[at - 1]
            if events[at - 1].kind is not Kind.DROP:
                if live[step] + size > workload.budget:
                    break
                live[step] += size
            at -= 1
        earliest = at
        placed.setdefault(at, []).append(s)
    found: list[Event] = []
    for position, event in enumerate(events):
        found += [Event(Kind.RELOAD, s) for s in placed.get(position, ())]
        if event.kind is not Kind.RELOAD:
            found.append(event)
    return tuple(found)


def _clock(workload: Workload, events: Sequence[Event]) -> list[float]:
    """Return the time of each event if nothing waits for a copy, in seconds from the start of the step."""
    took = [workload.seconds[index] if kind is Kind.RUN else 0.0 for kind, index in events]
    return [0.0, *np.cumsum(took).tolist()]


def _targets(workload: Workload, events: Sequence[Event], leads: Leads) -> dict[int, float]:
    """Return for each RELOAD (by position) the time at which it should start so that no wait is longer than needed."""
    clock = _clock(workload, events)
    left = Counter(s for kind, s in events if kind is Kind.RELOAD)
    found: dict[int, float] = {}
    waits: dict[int, float] = {}
    following = float("inf")
    for position in range(len(events) - 1, -1, -1):
        kind, s = events[position]
        if kind is Kind.RELOADED:
            waits[s] = clock[position]
        elif kind is Kind.RELOAD:
            left[s] -= 1
            following = min(waits.pop(s), following) - workload.to_device[s] - leads.get((s, left[s]), 0.0)
            found[position] = following
    return found
