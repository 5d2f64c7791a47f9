"""The search of the default policy: one decision per storage, what they cost together, and ways down to the budget.

A descent takes the decision with the most bytes saved per second until the budget is kept: of one storage at a time, or
of a whole class of similar ones. A model repeats its blocks, and a decision that helps in one helps in all: descents
over classes need a hundredth of the measurements, and end better on deep models. Of the class that reaches the budget,
only as many members as are needed get the decision, which bisection finds.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from memplan.errors import InvalidEviction
from memplan.evict.measure import Ints, WorkloadArrays, flat, to_arrays, to_events
from memplan.evict.measure_kernel import prefetch
from memplan.evict.search_kernel import (
    PIN,
    RECOMPUTE_EACH_TIME,
    RECOMPUTE_ONCE,
    TO_HOST,
    UNDECIDED,
    expand,
)
from memplan.evict.workload import Events, Kind, Workload


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
        self.arrays = WorkloadArrays(w)
        last = [uses[-1] if uses else -1 for uses in w.uses]
        touched = flat([(*reads, *writes) for reads, writes in zip(w.reads, w.writes, strict=True)])
        self.extra = (self.arrays.use_ptr, self.arrays.use, self.arrays.redo_until, np.array(last, np.int64), *touched)
        room = 12 * len(w.graph.ops) + 1000
        self.kinds, self.indices = np.empty(room, np.int64), np.empty(room, np.int64)
        self.moves = self._moves(swaps=swaps, least=least)

    def nothing(self) -> tuple[Ints, Ints]:
        """Return the decisions and gaps of a step in which everything is kept."""
        return np.full_like(self.arrays.size, UNDECIDED), np.full_like(self.arrays.size, -1)

    def start(self) -> Decisions:
        """Return the state in which everything is kept."""
        return self.judged(*self.nothing())

    def judged(self, decision: Ints, gap: Ints) -> Decisions:
        """Return decisions with their cost; `area` is infinite when they are impossible."""
        events = self._placed(decision, gap)
        found = None if events is None else self.arrays.measure(*events)
        if found is None:
            return Decisions(decision, gap, float("inf"), float("inf"), 0)
        return Decisions(decision, gap, found.area, found.seconds, found.peak)

    def after(self, state: Decisions, *moves: Move) -> Decisions:
        """Return the state after further moves."""
        decision, gap = state.decision.copy(), state.gap.copy()
        for move in moves:
            decision[move.storage], gap[move.storage] = move.decision, move.gap
        return self.judged(decision, gap)

    def events(self, state: Decisions) -> Events:
        """Return the events of the step under these decisions. Raises `InvalidEviction` if they are impossible."""
        events = self._placed(state.decision, state.gap)
        if events is None:
            raise InvalidEviction("an op's operands are not available under these decisions", where="decisions")
        return to_events(*events)

    def _placed(self, decision: Ints, gap: Ints) -> tuple[Ints, Ints] | None:
        """Return the kinds and indices of the events of decisions, with their copies placed; None if impossible."""
        run: Any = expand
        count = run(decision, gap, self.kinds, self.indices, *self.arrays.tables[:6], *self.extra)
        if count < 0:
            return None
        events = self.kinds[:count], self.indices[:count]
        placed: tuple[Ints, Ints] = prefetch(*events, self.workload.budget, self.arrays.tables)
        return placed

    def _moves(self, *, swaps: bool, least: float) -> tuple[tuple[Move, ...], ...]:
        """Return the possible moves of each storage with an idle interval, at its longest one."""
        w, redo = self.workload, self.workload.redo_until
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
            idle = [(w.clock[b] - w.clock[a + 1], a, b) for a, b in pairwise(uses) if a >= made]
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


Option = tuple[Move, ...]  # moves of different storages that are made together

_Tried = tuple[int, float, float]  # an option: its index, the area that it wins, the seconds that it takes

_CHEAPEST = 1e-9  # seconds: options that cost no time are compared by bytes


def singles(search: DecisionSearch) -> tuple[tuple[Option, ...], ...]:
    """Return the options of each storage, one move each."""
    return tuple(tuple((move,) for move in moves) for moves in search.moves)


def storage_classes(search: DecisionSearch) -> tuple[tuple[Option, ...], ...]:
    """Return the options of each class of storages: equal in size, and used by the same sequence of kernels."""
    classes: dict[tuple[object, ...], dict[int, list[Move]]] = {}
    for moves in search.moves:
        for move in moves:
            if move.decision != PIN:
                options = classes.setdefault(class_of(search, move.storage), {})
                options.setdefault(move.decision, []).append(move)
    return tuple(tuple(map(tuple, options.values())) for options in classes.values())


def class_of(search: DecisionSearch, storage: int) -> tuple[object, ...]:
    """Return what the storages of one class have in common: their size, and the kernels that use them."""
    w = search.workload
    return (w.size[storage], *(w.graph.ops[i].target for i in w.uses[storage]))


def descend(
    search: DecisionSearch, state: Decisions, exponent: float, choices: Sequence[Sequence[Option]] | None = None
) -> Decisions | None:
    """Return a state within the budget, by the best option at a time until the budget is kept; None if none helps.

    `choices` are those of single storages, or of classes: of the class that reaches the budget, as few members as
    possible are taken.
    """
    return descents(search, state, [exponent], choices)[0][0]


def descents(
    search: DecisionSearch,
    state: Decisions,
    exponents: Sequence[float],
    choices: Sequence[Sequence[Option]] | None = None,
) -> list[tuple[Decisions | None, Decisions]]:
    """Return what `descend` returns for each exponent, and the last state above the budget on its way.

    The option that reaches the budget is not taken in the latter, since not all of its moves may be needed. The first
    options are measured once.
    """
    options = [o for choice in choices or singles(search) for o in choice if o[0].decision != PIN]
    tried = _tried(search, state, options)
    return [_descent(search, state, options, exponent, tried) for exponent in exponents]


def _descent(
    search: DecisionSearch, state: Decisions, options: Sequence[Option], exponent: float, tried: Sequence[_Tried]
) -> tuple[Decisions | None, Decisions]:
    for after, index in _descending(search, state, options, exponent, tried):
        if after.area == 0:
            return _fewest(search, state, after, options[index]), state
        state = after
    return state if state.area == 0 else None, state


def _descending(
    search: DecisionSearch, state: Decisions, options: Sequence[Option], exponent: float, tried: Sequence[_Tried]
) -> Iterator[tuple[Decisions, int]]:
    """Yield the states of a descent, each with the index of the option that led to it.

    It ends when the budget is kept or no option helps. `tried` are the options from `state` on.

    The evaluation is lazy: an option's gain is measured again only when it is first in the queue; gains rarely rise.
    """
    queue = _priced(tried, exponent)
    fresh = True
    while state.area > 0:
        if not queue:
            queue = [] if fresh else _priced(_tried(search, state, options), exponent)
            fresh = True
            if not queue:
                return
        _, index = heapq.heappop(queue)
        after = search.after(state, *options[index])
        if not after.area < state.area:
            continue
        gain = _gain(state.area - after.area, after.seconds - state.seconds, exponent)
        if queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, index))
            continue
        state, fresh = after, False
        yield state, index


def _tried(search: DecisionSearch, state: Decisions, options: Sequence[Option]) -> list[_Tried]:
    """Return the options that reduce the area above the budget now, with that reduction and the seconds they take."""
    found = []
    for index, option in enumerate(options):
        if all(state.decision[move.storage] == move.decision for move in option):
            continue
        after = search.after(state, *option)
        if after.area < state.area:
            found.append((index, state.area - after.area, after.seconds - state.seconds))
    return found


def _priced(tried: Sequence[_Tried], exponent: float) -> list[tuple[float, int]]:
    """Return a heap of options, best first; ties by definition order."""
    queue = [(-_gain(won, seconds, exponent), index) for index, won, seconds in tried]
    heapq.heapify(queue)
    return queue


def _gain(won: float, seconds: float, exponent: float) -> float:
    return float(won / max(seconds, _CHEAPEST) ** exponent)


_TRIMS = 3  # of taking back what the budget does not need


def trimmed(search: DecisionSearch, state: Decisions) -> Decisions:
    """Return the state without the decisions of classes that the budget does not need (reverse-delete).

    The most expensive ones are tried first. Storages that would be recomputed although there is room for them are kept
    instead. The result keeps the budget, as `state` does, and takes no more time.
    """
    for _ in range(_TRIMS):
        before = state.seconds
        pins = [moves[-1] for moves in search.moves if moves[-1].decision == PIN]
        for group in _grouped(search, pins):
            undecided = [move for move in group if state.decision[move.storage] == UNDECIDED]
            state = _most(search, state, undecided, lambda a, b: a.seconds < b.seconds)
        taken = [Move(s, UNDECIDED, -1) for s in np.flatnonzero(state.decision != UNDECIDED).tolist()]
        groups = _grouped(search, taken, state)
        kept = [search.after(state, *group).seconds for group in groups]
        for _, group in sorted(zip(kept, groups, strict=True), key=lambda one: one[0]):
            state = _most(search, state, group, lambda a, b: a.seconds <= b.seconds)
        if state.seconds >= before:
            break
    return state


def parts_of(classes: Sequence[Sequence[Option]], count: int) -> tuple[tuple[Option, ...], ...]:
    """Return the choices for runs of neighbours in each class, which is divided into `count` runs or its members."""
    found = []
    for options in classes:
        most = min(count, max(map(len, options)))
        for k in range(most):
            parts = (option[len(option) * k // most : len(option) * (k + 1) // most] for option in options)
            found.append(tuple(filter(None, parts)))
    return tuple(filter(None, found))


def _grouped(search: DecisionSearch, moves: Sequence[Move], state: Decisions | None = None) -> list[list[Move]]:
    """Return the moves of one class together, with equal decisions in `state`."""
    found: dict[tuple[object, ...], list[Move]] = {}
    for move in moves:
        decided = -1 if state is None else int(state.decision[move.storage])
        found.setdefault((decided, *class_of(search, move.storage)), []).append(move)
    return list(found.values())


def _fewest(search: DecisionSearch, state: Decisions, whole: Decisions, option: Option) -> Decisions:
    """Return the state after as few of the moves of `option` as keep the budget; `whole` is the one after all of them.

    They are the first or the last moves, whichever take less time.
    """
    left = [move for move in option if state.decision[move.storage] != move.decision]
    found = (_last_within(search, state, moves, fewest=True) for moves in (left, left[::-1]))
    return min((whole, *filter(None, found)), key=lambda d: d.seconds)


def _most(
    search: DecisionSearch, state: Decisions, moves: Sequence[Move], better: Callable[[Decisions, Decisions], bool]
) -> Decisions:
    """Return the state within the budget after as many of the moves as possible, if it is `better` than `state`.

    They are the first or the last moves, whichever take less time.
    """
    if not moves:
        return state
    whole = search.after(state, *moves)
    if whole.area == 0:
        return whole if better(whole, state) else state
    best = state
    for some in (moves, moves[::-1]):
        found = _last_within(search, state, some, fewest=False)
        best = found if found is not None and better(found, best) else best
    return best


def _last_within(search: DecisionSearch, state: Decisions, moves: Sequence[Move], *, fewest: bool) -> Decisions | None:
    """Return the state after the fewest, or the most, of the first moves that keep the budget, by bisection.

    None where all of them, or none, are what keeps it.
    """
    low, high, found = 0, len(moves), None
    while high - low > 1:
        middle = (low + high) // 2
        after = search.after(state, *moves[:middle])
        found = after if after.area == 0 else found
        low, high = (low, middle) if (after.area == 0) is fewest else (middle, high)
    return found


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
