"""`capuchin`: Capuchin's guided execution (Peng et al. 2020), a published policy that `auto` is compared with.

While the step needs more than the budget: of the storages that are idle at the peak, the one with the most free
time is swapped, as long as the gap hides its copies; after that the one that saves the most bytes per second of
recompute (MSPS) is recomputed, unless a swap would stall for less. Capuchin estimates what a decision saves; here the
step is measured after each decision, which can only improve its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memplan.evict.measure import to_arrays
from memplan.evict.search import Decisions, DecisionSearch, Move
from memplan.evict.search_kernel import RECOMPUTE_ONCE, TO_HOST, UNDECIDED
from memplan.evict.workload import Events, Kind, Workload, infeasible, require_floor, with_host_resident_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """An idle interval of a storage between two accesses (op positions).

    `free_time` is how many seconds longer it lasts than the storage's copies out and back.
    """

    storage: int
    evicted_access: int
    back_access: int
    free_time: float


def capuchin(workload: Workload) -> Events:
    """Return events within the budget; host-resident storages stay on the device.

    Raises `BudgetInfeasible` when no storage that is idle at the peak is left to evict.
    """
    return with_host_resident_kept(workload, _guided)


def _guided(workload: Workload) -> Events:
    require_floor(workload)
    search = DecisionSearch(workload)
    state = search.start()
    gaps = gaps_of(search.workload)
    shown: dict[Gap, float] = {}
    while state.area > 0:
        peak = _peak_op(search, state)
        free = [g for g in gaps if state.decision[g.storage] == UNDECIDED]
        idle = [g for g in free if g.evicted_access < peak < g.back_access]
        after = (
            _hidden(search, state, idle, shown)
            or _cheapest(search, state, idle, shown)
            or _cheapest(search, state, free, shown)
        )
        if after is None:
            raise infeasible(workload)
        state = after
    return search.events(state)


def gaps_of(workload: Workload) -> tuple[Gap, ...]:
    """Return every interval in which a completely written storage of the arena is idle."""
    w = workload
    found = []
    for s, uses in enumerate(w.uses):
        if not w.size[s] or not w.writers[s]:
            continue
        for a, b in pairwise(uses):
            if a >= w.writers[s][-1] and b > a + 1:
                free = w.clock[b] - w.clock[a + 1] - w.to_host[s] - w.to_device[s]
                found.append(Gap(storage=s, evicted_access=a, back_access=b, free_time=free))
    return tuple(found)


def recompute_seconds(workload: Workload, storage: int, dropped: frozenset[int], position: int) -> float:
    """Return the seconds to recompute `storage` at `position` (an op), sources included that are not there then.

    A source that was `dropped`, or has had its last use, counts with its own sources (collective recomputation).
    """
    w, seen, stack, total = workload, {storage}, [storage], 0.0
    while stack:
        top = stack.pop()
        total += sum(w.seconds[i] for i in w.writers[top])
        for r in {r for i in w.writers[top] for r in w.reads[i]} - seen:
            seen.add(r)
            if w.recomputable[r] and (r in dropped or w.uses[r][-1] < position):
                stack.append(r)
    return total


def _hidden(search: DecisionSearch, state: Decisions, idle: list[Gap], shown: dict[Gap, float]) -> Decisions | None:
    """Return the state after the swap with the most free time that causes no stall; None when there is none.

    `shown` keeps the stall in seconds of the others, since the link only gets busier.
    """
    for g in sorted(idle, key=lambda g: -g.free_time):
        if g.free_time < 0:
            shown.setdefault(g, -g.free_time)
        if g in shown:
            continue
        after = search.after(state, Move(g.storage, TO_HOST, g.evicted_access))
        if after.seconds > state.seconds * (1 + 1e-9):
            shown[g] = after.seconds - state.seconds
        elif after.area < state.area:
            return after
    return None


def _cheapest(search: DecisionSearch, state: Decisions, idle: list[Gap], shown: dict[Gap, float]) -> Decisions | None:
    """Return the state after the recompute or stalling swap of the fewest seconds per byte; None when none helps."""
    w = search.workload
    dropped = frozenset(np.flatnonzero(state.decision == RECOMPUTE_ONCE).tolist())
    found = []
    for g in idle:
        if w.recomputable[g.storage] and w.redo_until[g.storage] >= g.back_access:
            seconds = recompute_seconds(w, g.storage, dropped, g.back_access)
            found.append((seconds / w.size[g.storage], Move(g.storage, RECOMPUTE_ONCE, g.evicted_access)))
        if g in shown:
            found.append((shown[g] / w.size[g.storage], Move(g.storage, TO_HOST, g.evicted_access)))
    for _, move in sorted(found, key=lambda one: one[0]):
        after = search.after(state, move)
        if after.area < state.area:
            return after
    return None


def _peak_op(search: DecisionSearch, state: Decisions) -> int:
    """Return the position of the op that runs at the peak, or of the last one before it."""
    events = search.events(state)
    figures = search.arrays.measure(*to_arrays(events))
    assert figures is not None
    peak, step, position = int(np.argmax(figures.live)), -1, -1
    ran: set[int] = set()
    for kind, index in events:
        step += kind is not Kind.DROP
        if kind is Kind.RUN and index not in ran:
            ran.add(index)
            position = index
            if step >= peak:
                break
    return position
