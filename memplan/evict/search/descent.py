"""Greedy descent to the budget, by bytes saved per second: one storage at a time, or whole classes of similar ones.

A model repeats its blocks, and a decision that helps in one helps in all: descents over classes of similar storages
need a hundredth of the measurements, and end better on deep models, where a descent over single storages treats equal
blocks unequally.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from memplan.evict.search.decisions import Decisions, DecisionSearch, Move
from memplan.evict.search.expand_kernel import PIN

Option = tuple[Move, ...]  # moves of different storages that are made together

_CHEAPEST = 1e-9  # seconds: options that cost no time are compared by bytes
_HEAT = 0.1  # the first temperature, in mean costs of one decision
_ROUNDS = 100  # of annealing for each option: more found nothing better for nano models


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


def descend(search: DecisionSearch, state: Decisions, exponent: float) -> Decisions | None:
    """Return the state after taking the best move until the budget is kept; None when no move helps any more."""
    options = [option for choices in singles(search) for option in choices if option[0].decision != PIN]
    for after, _ in descending(search, state, options, exponent):
        state = after
    return state if state.area == 0 else None


def descend_classes(
    search: DecisionSearch, state: Decisions, exponent: float, classes: Sequence[Sequence[Option]]
) -> Decisions:
    """Return the last state above the budget on a descent over `classes` (see `storage_classes`).

    The option that would reach the budget is not taken, since not all of its moves may be needed.
    """
    for after, _ in descending(search, state, [option for choices in classes for option in choices], exponent):
        if after.area == 0:
            break
        state = after
    return state


def descending(
    search: DecisionSearch, state: Decisions, options: Sequence[Option], exponent: float
) -> Iterator[tuple[Decisions, int]]:
    """Yield the states of a descent, each with the index of the option that led to it.

    It ends when the budget is kept or no option helps.

    The evaluation is lazy: an option's gain is measured again only when it is first in the queue; gains rarely rise.
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
        yield state, index


def _priced(
    search: DecisionSearch, state: Decisions, options: Iterable[Option], exponent: float
) -> list[tuple[float, int]]:
    """Return a heap of the options with a gain now, best first; ties by definition order."""
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
    """The result of a random walk: its best state within the budget, if any, and its last state."""

    best: Decisions | None
    last: Decisions


def anneal_walk(
    search: DecisionSearch, state: Decisions, choices: Sequence[Sequence[Option]], *, work: int, seed: int, soft: float
) -> Descended:
    """Anneal over one or two options at a time; `soft` is that of `search_kernel.anneal`.

    `work` limits it, in ops measured; with few options, a number of rounds for each of them does.
    """
    from memplan.evict.search.search_kernel import anneal

    plain = sum(search.workload.seconds)
    options = [option for options in choices for option in options]
    rounds = min(work // (len(search.workload.graph.ops) + 1), _ROUNDS * len(options))
    if rounds < 1 or state.seconds <= plain:
        return Descended(state if state.area == 0 else None, state)
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
