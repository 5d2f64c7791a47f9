"""Where the default policy starts, besides at nothing: what published policies decide on the same step.

A greedy descent is only as good as its start: where a plan must give up most of the step, one that computes whole
chains again on demand is far from what single decisions lead to, and better.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.arrays import to_arrays
from memplan.evict.capuchin import guided
from memplan.evict.dtr import dtr
from memplan.evict.events import Events, Kind
from memplan.evict.search import AGAIN, ONCE, Decisions, Search

_WORK = 4_000_000  # ops judged for Capuchin's decisions: enough for all of them below some thousand ops


def seeded(search: Search) -> tuple[Events | None, tuple[Decisions, ...]]:
    """(DTR's events, where they keep the budget; states to start from, which need not keep it)."""
    workload = search.workload
    try:
        events: Events | None = dtr(workload)
    except BudgetInfeasible:
        events = None
    states = []
    if events is not None:
        states.append(decisions_of(search, events))
        figures = search.arrays.measure(*to_arrays(events))
        events = events if figures is not None and figures.peak <= workload.budget else None
    states.append(guided(search, evaluations=_WORK // (len(workload.graph.ops) + 1)))
    return events, tuple(state for state in states if np.isfinite(state.area))


def decisions_of(search: Search, events: Events) -> Decisions:
    """The recomputes of `events` as decisions: once, after the use that they followed; or again and again."""
    w = search.workload
    decision, gap = (state.copy() for state in (search.start().decision, search.start().gap))
    times: dict[int, int] = {}
    after: dict[int, int] = {}
    ran: set[int] = set()
    position = -1
    for kind, index in events:
        if kind is Kind.DROP:
            after.setdefault(index, position)
        elif kind is Kind.RUN and index in ran:
            for s in w.writes[index]:
                times[s] = times.get(s, 0) + 1
        elif kind is Kind.RUN:
            ran.add(index)
            position = index
    for s, count in times.items():
        if w.redo_until[s] < 0 or s not in after:
            continue
        uses = w.uses[s]
        decision[s] = ONCE if count == 1 else AGAIN
        gap[s] = uses[max(bisect_left(uses, after[s] + 1) - 1, 0)] if count == 1 else -1
    return search.judged(decision, gap)
