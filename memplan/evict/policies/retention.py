"""Retention intervals as a constraint program for OR-Tools (Moccasin, Bartan et al. 2023).

Before op t runs for the first time, earlier ops may run again, in order: row t has t + 1 slots, one for each op up to
t. A storage has a few *lives*, each from a run of its writers to an end that the solver chooses. Every read of the
storage lies within one of its lives, and at every slot the lives fit in the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, Any

from memplan.evict.events import Event, Events, Kind
from memplan.evict.workload import Workload

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

TICKS = 1e10  # ticks per second: the objective is a whole number of ticks


@dataclass(slots=True)
class _Retention:
    """One life of a storage. `begin` is the first slot of the row in which its writers run; each runs at `begin` plus
    its own index.
    """

    present: Any
    begin: Any
    first: int  # index of its first writer
    ready: int  # index of its last writer
    end: Any = None

    def after(self, slot: Any) -> Any:
        """Return the condition that this life begins after `slot`."""
        return self.begin + self.first > slot


class RetentionProgram:
    """The constraint program of a workload; `runs[writers]` are the optional further runs: (active, begin)."""

    def __init__(self, workload: Workload, lives: int) -> None:
        from ortools.sat.python import cp_model

        self.w, self.model, self._count = workload, cp_model.CpModel(), lives
        self.horizon = _slot(len(workload.graph.ops), 0)
        self.runs: dict[tuple[int, ...], list[tuple[Any, Any]]] = {}
        self.lives: dict[int, list[_Retention]] = {}
        self._make_runs()
        self._make_lives()
        for i in range(len(workload.graph.ops)):
            self._require_reads(i, _slot(i, i), True)
        for writers, runs in self.runs.items():
            for active, begin in runs:
                for i in writers:
                    self._require_reads(i, begin + i, active)
        self._make_room()
        cost = {writers: round(TICKS * sum(workload.seconds[i] for i in writers)) for writers in self.runs}
        self.model.minimize(sum(cost[u] * active for u, runs in self.runs.items() for active, _ in runs))

    def _make_runs(self) -> None:
        """Add variables for further runs: each group of writers can run again, together, in a later row."""
        from ortools.sat.python import cp_model

        w = self.w
        for s, writers in enumerate(w.writers):
            if writers in self.runs or not w.recomputable[s] or not self._planned(s):
                continue
            rows = range(writers[-1] + 1, min(w.redo_until[s], len(w.graph.ops) - 1) + 1)
            runs: list[tuple[Any, Any]] = []
            for k in range(self._count - 1 if rows else 0):
                active = self.model.new_bool_var(f"again{writers[0]}.{k}")
                domain = cp_model.Domain.from_values([_slot(t, 0) for t in rows])
                runs.append((active, self.model.new_int_var_from_domain(domain, f"row{writers[0]}.{k}")))
            for (one, early), (two, late) in pairwise(runs):
                self.model.add_implication(two, one)
                self.model.add(early < late).only_enforce_if(two)
            self.runs[writers] = runs

    def _make_lives(self) -> None:
        w = self.w
        for s, writers in enumerate(w.writers):
            if not self._planned(s):
                continue
            base = _Retention(True, _slot(writers[0], 0), writers[0], writers[0])
            base.end = self.model.new_int_var(_slot(writers[-1], writers[-1]), self.horizon, f"end{s}")
            found = [base]
            for k, (active, begin) in enumerate(self.runs.get(writers, ()) if w.recomputable[s] else ()):
                life = _Retention(active, begin, writers[0], writers[-1])
                life.end = self.model.new_int_var(0, self.horizon, f"end{s}.{k}")
                self.model.add(life.end >= begin + writers[-1]).only_enforce_if(active)
                found.append(life)
            self.lives[s] = found

    def _require_reads(self, i: int, slot: Any, active: Any) -> None:
        """Require that whatever op i reads at `slot` is alive there."""
        own = self.w.graph.written(self.w.graph.ops[i])
        for s in self.w.reads[i]:
            if s in own or s not in self.lives:
                continue
            within = []
            for life in self.lives[s]:
                inside = self.model.new_bool_var("")
                within.append(inside)
                self.model.add(life.end >= slot).only_enforce_if(inside)
                if life.present is not True:
                    self.model.add_implication(inside, life.present)
                    self.model.add(life.begin + life.ready < slot).only_enforce_if(inside)
            self.model.add_bool_or([*within, *([] if active is True else [active.negated()])])

    def _make_room(self) -> None:
        """Require that the lives fit in the budget at every slot; an in-place result's life begins one slot later."""
        later = self._takeovers()
        intervals, sizes = [], []
        for s, found in self.lives.items():
            for k, life in enumerate(found):
                start = life.begin + life.first
                if (s, k) in later:
                    at = self.model.new_int_var(0, self.horizon + 1, "")
                    self.model.add(at == start + sum(later[s, k]))
                    start = at
                length = self.model.new_int_var(0, self.horizon + 1, "")
                if life.present is True:
                    intervals.append(self.model.new_interval_var(start, length, life.end + 1, ""))
                else:
                    intervals.append(
                        self.model.new_optional_interval_var(start, length, life.end + 1, life.present, "")
                    )
                sizes.append(self.w.size[s])
        unit = gcd(*sizes) if sizes else 1
        budget = self.w.budget - sum(self.w.begun)  # as if the gradients that stay were there from the first step on
        self.model.add_cumulative(intervals, [size // unit for size in sizes], max(budget, 0) // unit)
        if budget < 0:
            self.model.add_bool_or([])

    def _takeovers(self) -> dict[tuple[int, int], list[Any]]:
        """Return (storage, number of its life) -> variables that say that it takes the bytes of an input in place."""
        found: dict[tuple[int, int], list[Any]] = {}
        for i, pairs in enumerate(self.w.pairs):
            runs = self.runs.get(self.w.writers[pairs[0][0]], ()) if pairs else ()
            for k, (active, slot) in enumerate([(True, _slot(i, i)), *((a, b + i) for a, b in runs)]):
                chosen = []
                for out, host in pairs:
                    if out not in self.lives or k >= len(self.lives[out]) or self.w.writers[out][0] != i:
                        continue
                    taken = self.model.new_bool_var("")
                    if active is not True:
                        self.model.add_implication(taken, active)
                    for life in self.lives[host]:
                        self._require_over(life, slot, taken)
                    chosen.append(taken)
                    found.setdefault((out, k), []).append(taken)
                self.model.add_at_most_one(chosen)
        return found

    def _require_over(self, life: _Retention, slot: Any, when: Any) -> None:
        """Require, if `when`, that `life` ends at `slot` or before, begins after it, or is not present."""
        over, late = self.model.new_bool_var(""), self.model.new_bool_var("")
        self.model.add(life.end <= slot).only_enforce_if(over)
        self.model.add(life.after(slot)).only_enforce_if(late)
        absent = [] if life.present is True else [life.present.negated()]
        self.model.add_bool_or([over, late, *absent]).only_enforce_if(when)

    def _planned(self, s: int) -> bool:
        """Return whether the program models the storage: it has bytes, and the step writes it."""
        return self.w.size[s] > 0 and bool(self.w.writers[s])

    # -- events ------------------------------------------------------------------------------------------

    def hint(self, events: Events) -> None:
        """Give the solver `events` to start from, as far as they have this form."""
        rows, lasts = _runs_of(self.w, events)
        for writers, runs in self.runs.items():
            for k, (active, begin) in enumerate(runs):
                known = rows.get(writers[0], [])
                self.model.add_hint(active, k < len(known))
                if k < len(known):
                    self.model.add_hint(begin, _slot(known[k], 0))
        for s, found in self.lives.items():
            for k, life in enumerate(found):
                if k < len(lasts.get(s, ())):
                    self.model.add_hint(life.end, lasts[s][k])

    def events(self, solver: cp_model.CpSolver) -> Events:
        """Return the solution as events; a storage that no life holds is dropped right before its recompute."""
        again: dict[int, list[int]] = {}  # row -> ops that run again in it
        for writers, runs in self.runs.items():
            for active, begin in runs:
                if solver.boolean_value(active):
                    again.setdefault(solver.value(begin), []).extend(writers)
        held: dict[int, list[tuple[int, int]]] = {}
        for s, found in self.lives.items():
            present = [life for life in found if life.present is True or solver.boolean_value(life.present)]
            held[s] = [(solver.value(life.begin) + life.first, solver.value(life.end)) for life in present]
        events: list[Event] = []
        for t in range(len(self.w.graph.ops)):
            row = _slot(t, 0)
            for i in sorted(again.get(row, ())):
                for s in self.w.writes[i]:
                    first = self.w.writers[s][0] == i
                    if first and not any(start < row + i <= end for start, end in held.get(s, ())):
                        events.append(Event(Kind.DROP, s))
                events.append(Event(Kind.RUN, i))
            events.append(Event(Kind.RUN, t))
        return tuple(events)


def _slot(row: int, op: int) -> int:
    """Return the number of an op's slot in a row."""
    return row * (row + 1) // 2 + op


def _runs_of(workload: Workload, events: Events) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
    """Return the rows in which each op runs again, and the last slot of each life of each storage."""
    rows: dict[int, list[int]] = {}
    lasts: dict[int, list[int]] = {}
    ran: set[int] = set()
    row = 0
    for kind, index in events:
        if kind is Kind.DROP and index in lasts:
            lasts[index].append(-1)
        if kind is not Kind.RUN:
            continue
        if index in ran:
            rows.setdefault(index, []).append(row)
        else:
            ran.add(index)
            row = index + 1
        slot = _slot(row if index != row - 1 else index, index)
        for s in (*workload.reads[index], *workload.writes[index]):
            found = lasts.setdefault(s, [-1])
            found[-1] = max(found[-1], slot)
    return rows, lasts
