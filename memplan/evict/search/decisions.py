"""Decisions per storage, and what they cost: the state that the default policy searches in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from memplan.errors import InvalidEviction
from memplan.evict.events import Events
from memplan.evict.judge.arrays import Ints, WorkloadArrays, to_arrays, to_events
from memplan.evict.search.expand_kernel import AGAIN, KEEP, ONCE, SAVE, SWAP, expand
from memplan.evict.search.prefetch_kernel import prefetch
from memplan.evict.search.search_kernel import judge
from memplan.evict.workload import Workload

__all__ = ["AGAIN", "KEEP", "ONCE", "SAVE", "SWAP", "Decisions", "Move", "Search"]


@dataclass(frozen=True, slots=True)
class Move:
    """Let `storage` be treated as `decision` says, at the use `gap` (an op index; -1 where it has none)."""

    storage: int
    decision: int
    gap: int


@dataclass(slots=True)
class Decisions:
    """One decision per storage, with what all of them together need and take."""

    decision: Ints
    gap: Ints
    area: float
    seconds: float
    peak: int


class DecisionSearch:
    """Judges decisions on a workload; `swaps`: copies to the host are allowed.

    What could win less than `least` of the bytes above the budget is left out. `extra` is what `expand` takes beyond
    the tables.
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
        """What the kernels take."""
        return self.arrays.tables

    def nothing(self) -> tuple[Ints, Ints]:
        """The decisions and gaps of a step in which everything is kept."""
        return np.full_like(self.arrays.size, KEEP), np.full_like(self.arrays.size, -1)

    def start(self) -> Decisions:
        """Everything is kept."""
        return self.judged(*self.nothing())

    def judged(self, decision: Ints, gap: Ints) -> Decisions:
        """Decisions with their price; `area` is infinite when they cannot be."""
        self.evaluations += 1
        budget, room = self.workload.budget, (self.kinds, self.indices)
        area, seconds, peak = judge(decision, gap, budget, *room, self.extra, self.tables)
        return Decisions(decision, gap, float(area), float(seconds), int(peak))

    def after(self, state: Decisions, *moves: Move) -> Decisions:
        """The state after some more moves."""
        decision, gap = state.decision.copy(), state.gap.copy()
        for move in moves:
            decision[move.storage], gap[move.storage] = move.decision, move.gap
        return self.judged(decision, gap)

    def events(self, state: Decisions) -> Events:
        """What the step does under these decisions. Raises `InvalidEviction` when they cannot be."""
        run: Any = expand
        count = run(state.decision, state.gap, self.kinds, self.indices, *self.tables[:6], *self.extra)
        if count < 0:
            raise InvalidEviction("an op cannot have what it needs under these decisions", where="decisions")
        kinds, indices = self.kinds[:count].copy(), self.indices[:count].copy()
        return to_events(*prefetch(kinds, indices, self.workload.budget, self.tables))

    def _moves(self, *, swaps: bool, least: float) -> tuple[tuple[Move, ...], ...]:
        """What could be done with each storage that is idle for a while, at its longest idle interval."""
        w, redo = self.workload, self.workload.redo_until
        clock = np.concatenate(([0.0], np.cumsum(w.seconds)))
        plain = self.arrays.measure(*to_arrays(w.plain))
        assert plain is not None
        live = plain.live  # no streamed storages: a step for each op
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
                    moves += [Move(s, ONCE, at), Move(s, AGAIN, -1)]
                if swaps:
                    moves.append(Move(s, SWAP, at))
            if redo[s] >= 0:
                moves.append(Move(s, SAVE, -1))
            if moves:
                found.append(tuple(moves))
        return tuple(found)
