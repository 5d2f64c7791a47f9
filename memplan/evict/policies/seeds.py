"""Where the default policy starts, besides at nothing: what published policies decide on the same step.

A greedy descent is only as good as its start: where a plan must give up most of the step, one that computes whole
chains again on demand is far from what single decisions lead to, and better.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events, Kind
from memplan.evict.judge.arrays import to_arrays
from memplan.evict.policies.capuchin import guided
from memplan.evict.policies.dtr import dtr
from memplan.evict.search.decisions import AGAIN, ONCE, SWAP, Decisions, DecisionSearch

_WORK = 4_000_000  # ops judged for Capuchin's decisions: enough for all of them below some thousand ops


def seeded(search: DecisionSearch, *, quick: bool = False) -> tuple[Events | None, tuple[Decisions, ...]]:
    """(DTR's events, where they keep the budget; states to start from, which need not keep it).

    `quick`: without Capuchin's, which take longer than DTR's.
    """
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
    if not quick:
        state = guided(search, evaluations=_WORK // (len(workload.graph.ops) + 1))
        states += [state, decisions_of(search, search.events(state))]  # as it is, and with what runs often AGAIN
    return events, tuple(state for state in states if np.isfinite(state.area))


def decisions_of(search: DecisionSearch, events: Events) -> Decisions:
    """What `events` do as decisions: swapped after a use; computed again once, after a use, or again and again."""
    w = search.workload
    decision, gap = search.nothing()
    times: dict[int, int] = {}
    after: dict[int, int] = {}
    away: dict[int, int] = {}
    ran: set[int] = set()
    position = -1
    for kind, index in events:
        if kind is Kind.DROP:
            after.setdefault(index, position)
        elif kind is Kind.OFFLOAD:
            away.setdefault(index, position)
        elif kind is Kind.RUN and index in ran:
            for s in w.writes[index]:
                times[s] = times.get(s, 0) + 1
        elif kind is Kind.RUN:
            ran.add(index)
            position = index
    for s, count in times.items():
        if w.redo_until[s] < 0 or s not in after:
            continue
        decision[s] = ONCE if count == 1 else AGAIN
        gap[s] = _use(w.uses[s], after[s]) if count == 1 else -1
    for s, at in away.items():
        decision[s], gap[s] = SWAP, _use(w.uses[s], at)
    return search.judged(decision, gap)


def _use(uses: Sequence[int], position: int) -> int:
    """The last use at or before a position."""
    return uses[max(bisect_right(uses, position) - 1, 0)]
