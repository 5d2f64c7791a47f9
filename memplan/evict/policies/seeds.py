"""Start states of the default policy, from the decisions of published policies and of the user on the same step.

The result of a greedy descent depends on its start: under a tight budget, a plan that recomputes whole chains on demand
is better than what single decisions lead to from a step that keeps everything. Activation checkpoints of the model are
a start too, so that no budget that they keep leads to a slower step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events, Kind
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.ahead import on_demand
from memplan.evict.policies.capuchin import guided
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.policies.dtr import dtr
from memplan.evict.search.decisions import RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE, TO_HOST, Decisions, DecisionSearch

_WORK = 4_000_000  # ops measured for Capuchin's decisions: enough for all of them on graphs of some thousand ops


def seeded(search: DecisionSearch, *, quick: bool = False) -> tuple[tuple[Events, ...], tuple[Decisions, ...]]:
    """Return (events of `on_demand` and of checkpoints that keep the budget; start states, which may exceed it).

    The start states are DTR's and Capuchin's decisions, and those of checkpoints.

    `quick`: leave out `on_demand`, and Capuchin's decisions, which take longer than DTR's.
    """
    workload = search.workload
    checkpointed = any(op.checkpoint for op in workload.graph.ops)
    states: list[Decisions] = []
    kept = [] if quick else list(on_demand(workload))
    for policy in (dtr, checkpoint) if checkpointed else (dtr,):
        with suppress(BudgetInfeasible):
            events = policy(workload)
            states.append(decisions_of(search, events))
            if measure(workload, events).peak <= workload.budget:
                kept.append(events)
    if not quick:
        state = guided(search, evaluations=_WORK // (len(workload.graph.ops) + 1))
        again = decisions_of(search, search.events(state))  # recomputes each time what runs repeatedly
        states += [state, again]
    return tuple(kept), tuple(state for state in states if np.isfinite(state.area))


def decisions_of(search: DecisionSearch, events: Events) -> Decisions:
    """Return decisions that describe `events`.

    TO_HOST: offloaded after a use. RECOMPUTE_ONCE: recomputed once. RECOMPUTE_EACH_TIME: recomputed several times.
    """
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
        decision[s] = RECOMPUTE_ONCE if count == 1 else RECOMPUTE_EACH_TIME
        gap[s] = _use(w.uses[s], after[s]) if count == 1 else -1
    for s, at in away.items():
        decision[s], gap[s] = TO_HOST, _use(w.uses[s], at)
    return search.judged(decision, gap)


def _use(uses: Sequence[int], position: int) -> int:
    """Return the last use at or before a position."""
    return uses[max(bisect_right(uses, position) - 1, 0)]


def drastic(search: DecisionSearch, ways: Sequence[int]) -> Iterator[Decisions]:
    """Yield, for each of `ways` (decisions), the state in which every storage that allows it is treated that way."""
    for wanted in ways:
        decision, gap = search.nothing()
        for moves in search.moves:
            for move in moves:
                if move.decision == wanted:
                    decision[move.storage], gap[move.storage] = move.decision, move.gap
        state = search.judged(decision, gap)
        if np.isfinite(state.area):
            yield state
