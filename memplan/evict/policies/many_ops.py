"""The search of the default policy for steps of many ops: repeated blocks are decided together.

Measuring a step takes time in proportion to its ops, and a search over single storages measures it in proportion to its
storages: what takes seconds for some hundred ops would take half an hour for a model of 80 blocks. Here the decisions
are those of classes of similar storages and of shares of them (`class_shares.py`), from the same starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from memplan.evict.events import Events
from memplan.evict.policies.ahead import on_demand
from memplan.evict.policies.seeds import drastic, seeded
from memplan.evict.search.class_shares import descend_shares, parts_of, trimmed_shares
from memplan.evict.search.decisions import RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE, TO_HOST, Decisions, DecisionSearch
from memplan.evict.search.descent import Option, anneal_walk, descend_classes, storage_classes

MANY_OPS = 2_500  # from here on, classes of storages are decided instead of single ones
_PARTS = 8  # of a class, which are decided one by one too
_TRIMMED = 2  # how many of the best candidates are trimmed
_WALKS = 4  # how many times less work a walk over classes gets than the one over parts of them

_Classes = Sequence[Sequence[Option]]


def decide_classes(
    search: DecisionSearch, start: Decisions, exponents: Sequence[float], *, tight: bool, rounds: int, seed: int
) -> list[Events]:
    """Return events that keep the budget, by decisions about classes of storages; none if no way is found.

    Args:
        search: The step, and its budget.
        start: The state in which everything is kept.
        exponents: Those of the gains by which the descents choose.
        tight: Begin at states that evict everything, too.
        rounds: The states that annealing measures, at most; with 0, the first events that are found are returned.
        seed: That of annealing.
    """
    classes = storage_classes(search)
    others, seeds = seeded(search, quick=True)
    starts = [start, *seeds]
    if tight:
        starts += drastic(search, (TO_HOST, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    if rounds:
        others = (*others, *on_demand(search.workload))
        starts += _walked(search, start, exponents, classes, rounds=rounds // _WALKS, seed=seed)
    found = [
        fitted
        for origin in starts
        for exponent in exponents[: len(exponents) if origin is start else 1]
        if (fitted := descend_shares(search, origin, exponent, classes))
    ]
    parts = parts_of(classes, _PARTS)
    if rounds:
        found += [fitted for exponent in exponents if (fitted := descend_shares(search, start, exponent, parts))]
    if not found:
        return list(others)
    found.sort(key=lambda d: d.seconds)
    best = found[0]
    if rounds:
        best = min((trimmed_shares(search, one) for one in found[:_TRIMMED]), key=lambda d: d.seconds)
        best = _annealed(search, best, parts, rounds=rounds, seed=seed)
    return [search.events(best), *others]


def _walked(
    search: DecisionSearch,
    start: Decisions,
    exponents: Sequence[float],
    classes: _Classes,
    *,
    rounds: int,
    seed: int,
) -> list[Decisions]:
    """Return the last states above the budget on descents over classes, and where random walks lead from there."""
    ends = [descend_classes(search, start, exponent, classes) for exponent in exponents]
    work = rounds * _ops(search)
    walks = [anneal_walk(search, end, classes, work=work, seed=seed, soft=1.0) for end in ends]
    return [state for walk in walks for state in (walk.best, walk.last) if state is not None]


def _annealed(search: DecisionSearch, state: Decisions, parts: _Classes, *, rounds: int, seed: int) -> Decisions:
    """Return the best state within the budget that a random walk over parts of classes finds."""
    walk = anneal_walk(search, state, parts, work=rounds * _ops(search), seed=seed, soft=0.0)
    return state if walk.best is None or walk.best is state else trimmed_shares(search, walk.best)


def _ops(search: DecisionSearch) -> int:
    """Return the work of measuring one state."""
    return len(search.workload.graph.ops) + 1
