"""The state of the default policy's search: one decision per storage, and the cost of all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from memplan.errors import InvalidEviction
from memplan.evict.events import Events
from memplan.evict.judge.arrays import Ints, WorkloadArrays, to_arrays, to_events
from memplan.evict.search.expand_kernel import PIN, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE, TO_HOST, UNDECIDED, expand
from memplan.evict.search.prefetch_kernel import prefetch
from memplan.evict.search.search_kernel import judge
from memplan.evict.workload import Workload

__all__ = [
    "RECOMPUTE_EACH_TIME",
    "UNDECIDED",
    "RECOMPUTE_ONCE",
    "PIN",
    "TO_HOST",
    "DecisionSearch",
    "Decisions",
    "Move",
]


@dataclass(frozen=True, slots=True)
class Move:
    """A change of one decision: that of `storage`, at the use `gap` (an op index; -1 for decisions without one)."""

    storage: int
    decision: int
    gap: int


@dataclass(slots=True)
class Decisions:
    """One decision per storage, and their common cost.

    `area` is the sum over steps of the bytes above the budget, `seconds` the time of the step, `peak` its bytes.
    """

    decision: Ints
    gap: Ints
    area: float
    seconds: float
    peak: int


class DecisionSearch:
    """Measures decisions on a workload; `swaps`: copies to the host are allowed.

    Moves that could save less than the share `least` of the area above the budget are left out. `extra` are the
    arguments of `expand` besides the tables.
    """

    def __init__(self, workload: Workload, *, swaps: bool = True, least: float = 1e-5) -> None:
        self.workload = w = workload
        self.swaps = swaps
        self.arrays = WorkloadArrays(w)
        last = [uses[-1] if uses else -1 for uses in w.uses]
        self.extra = (self.arrays.use_ptr, self.arrays.use, self.arrays.redo_until, np.array(last, np.int64))
        room = 12 * len(w.graph.ops) + 1000
        self.kinds, self.indices = np.empty(room, np.int64), np.empty(room, np.int64)
        self.evaluations = 0
        self.moves = self._moves(swaps=swaps, least=least)

    @property
    def tables(self) -> tuple[Any, ...]:
        """The arrays that the kernels take."""
        return self.arrays.tables

    def nothing(self) -> tuple[Ints, Ints]:
        """Return the decisions and gaps of a step in which everything is kept."""
        return np.full_like(self.arrays.size, UNDECIDED), np.full_like(self.arrays.size, -1)

    def start(self) -> Decisions:
        """Return the state in which everything is kept."""
        return self.judged(*self.nothing())

    def judged(self, decision: Ints, gap: Ints) -> Decisions:
        """Return decisions with their cost; `area` is infinite when they are impossible."""
        self.evaluations += 1
        budget, room = self.workload.budget, (self.kinds, self.indices)
        area, seconds, peak = judge(decision, gap, budget, *room, self.extra, self.tables)
        return Decisions(decision, gap, float(area), float(seconds), int(peak))

    def after(self, state: Decisions, *moves: Move) -> Decisions:
        """Return the state after further moves."""
        decision, gap = state.decision.copy(), state.gap.copy()
        for move in moves:
            decision[move.storage], gap[move.storage] = move.decision, move.gap
        return self.judged(decision, gap)

    def events(self, state: Decisions) -> Events:
        """Return the events of the step under these decisions. Raises `InvalidEviction` if they are impossible."""
        run: Any = expand
        count = run(state.decision, state.gap, self.kinds, self.indices, *self.tables[:6], *self.extra)
        if count < 0:
            raise InvalidEviction("an op's operands are not available under these decisions", where="decisions")
        kinds, indices = self.kinds[:count].copy(), self.indices[:count].copy()
        return to_events(*prefetch(kinds, indices, self.workload.budget, self.tables))

    def _moves(self, *, swaps: bool, least: float) -> tuple[tuple[Move, ...], ...]:
        """Return the possible moves of each storage with an idle interval, at its longest one."""
        w, redo = self.workload, self.workload.redo_until
        clock = np.concatenate(([0.0], np.cumsum(w.seconds)))
        plain = self.arrays.measure(*to_arrays(w.plain))
        assert plain is not None
        live = plain.live  # one step for each op, since no storage is host-resident
        over = np.concatenate(([0], np.cumsum(live > w.budget)))
        least *= float(np.maximum(live - w.budget, 0).sum())
        found = []
        for s, uses in enumerate(w.uses):
            if not w.size[s] or not w.graph.storages[s].planned or not w.writers[s]:
                continue
            made = w.writers[s][-1]
            idle = [(clock[b] - clock[a + 1], a, b) for a, b in pairwise(uses) if a >= made]
            _, at, back = max(idle, default=(0.0, 0, 0))
            moves = []
            if w.size[s] * (over[back] - over[at]) > least:
                if redo[s] >= 0:
                    moves += [Move(s, RECOMPUTE_ONCE, at), Move(s, RECOMPUTE_EACH_TIME, -1)]
                if swaps:
                    moves.append(Move(s, TO_HOST, at))
            if redo[s] >= 0:
                moves.append(Move(s, PIN, -1))
            if moves:
                found.append(tuple(moves))
        return tuple(found)
