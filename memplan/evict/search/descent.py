"""Greedy ways down to the budget, by bytes won per second: a storage at a time, or all alike storages together.

A model repeats its blocks, and what pays in one pays in all: descents over classes of alike storages take a hundredth
of the judgements, and end better on deep models, where a descent over single storages treats equal blocks unequally.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.evict.search.decisions import Decisions, DecisionSearch, Move
from memplan.evict.search.expand_kernel import SAVE

Option = tuple[Move, ...]  # of different storages, taken together

_CHEAPEST = 1e-9  # seconds: what costs nothing is compared by bytes
_HEAT = 0.1  # the first temperature, in mean costs of one decision


def singles(search: DecisionSearch) -> tuple[tuple[Option, ...], ...]:
    """What can be done with each storage."""
    return tuple(tuple((move,) for move in moves) for moves in search.moves)


def alike(search: DecisionSearch) -> tuple[tuple[Option, ...], ...]:
    """What can be done with each class of storages of one size that the same chain of kernels uses."""
    graph = search.workload.graph
    classes: dict[tuple[object, ...], dict[int, list[Move]]] = {}
    for moves in search.moves:
        for move in moves:
            if move.decision != SAVE:
                kernels = tuple(graph.ops[i].target for i in search.workload.uses[move.storage])
                options = classes.setdefault((search.workload.size[move.storage], *kernels), {})
                options.setdefault(move.decision, []).append(move)
    return tuple(tuple(map(tuple, options.values())) for options in classes.values())


def descend(search: DecisionSearch, state: Decisions, exponent: float) -> Decisions | None:
    """Take the best move until nothing is above the budget; None when no move helps any more."""
    options = [option for choices in singles(search) for option in choices if option[0].decision != SAVE]
    for after in _steps(search, state, options, exponent):
        state = after
    return state if state.area == 0 else None


def descend_alike(
    search: DecisionSearch, state: Decisions, exponent: float, classes: Sequence[Sequence[Option]]
) -> Decisions:
    """Take the best of `classes` (see `alike`), as long as not all of it can be taken without need."""
    for after in _steps(search, state, [option for choices in classes for option in choices], exponent):
        if after.area == 0:
            break
        state = after
    return state


def _steps(search: DecisionSearch, state: Decisions, options: Sequence[Option], exponent: float) -> Iterator[Decisions]:
    """The states on the way down, after one option each, until nothing is above the budget or no option helps.

    Lazy: an option's price is looked at again only when it comes first; prices rarely fall.
    """
    queue: list[tuple[float, int]] = []
    fresh = False
    while state.area > 0:
        if not queue:
            queue = [] if fresh else _priced(search, state, options, exponent)
            fresh = True
            if not queue:
                return
        _, index = heapq.heappop(queue)
        after = search.after(state, *options[index])
        gain = _gain(state, after, exponent)
        if gain <= 0:
            continue
        if queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, index))
            continue
        state, fresh = after, False
        yield state


def _priced(
    search: DecisionSearch, state: Decisions, options: Iterable[Option], exponent: float
) -> list[tuple[float, int]]:
    """A heap of the options that win something now, best first; ties by definition order."""
    queue = []
    for index, option in enumerate(options):
        if all(state.decision[move.storage] == move.decision for move in option):
            continue
        gain = _gain(state, search.after(state, *option), exponent)
        if gain > 0:
            queue.append((-gain, index))
    heapq.heapify(queue)
    return queue


def _gain(before: Decisions, after: Decisions, exponent: float) -> float:
    won = before.area - after.area
    if not won > 0:
        return 0.0
    return float(won / max(after.seconds - before.seconds, _CHEAPEST) ** exponent)


@dataclass(frozen=True, slots=True)
class Descended:
    """Where a random walk has been: its best state that keeps the budget, if any, and the last that need not."""

    best: Decisions | None
    last: Decisions


def walk(
    search: DecisionSearch, state: Decisions, choices: Sequence[Sequence[Option]], *, work: int, seed: int, soft: float
) -> Descended:
    """Anneal over one or two options at a time, for `work` ops judged; see `search_kernel.anneal` for `soft`."""
    from memplan.evict.search.search_kernel import anneal

    plain = sum(search.workload.seconds)
    rounds = work // (len(search.workload.graph.ops) + 1)
    if rounds < 1 or state.seconds <= plain or not choices:
        return Descended(state if state.area == 0 else None, state)
    options = [option for options in choices for option in options]
    members = [move for option in options for move in option]
    overhead = state.seconds - plain
    taken = sum(any(state.decision[move.storage] == move.decision for move in option) for option in options) or 1
    tables = (
        np.cumsum([0, *map(len, choices)]),
        np.cumsum([0, *map(len, options)]),
        np.array([move.decision for move in members], np.int64),
        np.array([move.storage for move in members], np.int64),
        np.array([move.gap for move in members], np.int64),
    )
    decision, gap = state.decision.copy(), state.gap.copy()
    best, best_gap, seconds = anneal(
        *(decision, gap, search.workload.budget, state.seconds, state.area, tables, rounds, soft),
        *(_HEAT * overhead / taken, overhead / search.start().area, seed),
        *(search.kinds, search.indices, search.extra, search.tables),
    )
    found = search.judged(best, best_gap) if np.isfinite(seconds) else None
    assert found is None or found.seconds == seconds
    return Descended(found, search.judged(decision, gap))
