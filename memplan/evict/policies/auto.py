"""The default policy: a greedy search by bytes saved per second, then reverse-delete and annealing.

Every candidate decision (recompute a storage once, or before every use; offload it) is measured exactly by simulating
the bytes of the whole step, not estimated. The gain of a decision is how much it reduces the area of live bytes above
the budget, not the peak: the area falls even while another step still holds the peak (`descent.py`). Reverse-delete
then takes back decisions that are not needed, and annealing varies one or two decisions at a time. The decisions of
published policies serve as further starts (`seeds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.events import Events
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.delta import delta
from memplan.evict.policies.flow import flow
from memplan.evict.policies.loading import while_loading
from memplan.evict.policies.many_ops import MANY_OPS, decide_classes
from memplan.evict.policies.seeds import drastic, seeded
from memplan.evict.search.decisions import (
    PIN,
    RECOMPUTE_EACH_TIME,
    RECOMPUTE_ONCE,
    TO_HOST,
    UNDECIDED,
    Decisions,
    DecisionSearch,
    Move,
)
from memplan.evict.search.descent import anneal_walk, descend, descend_classes, singles, storage_classes
from memplan.evict.workload import Workload
from memplan.evict.workload_limits import infeasible

_EXPONENTS = (1.0, 0.5)  # a gain is bytes saved / seconds ** exponent
_WORK = 4_000_000  # ops measured by annealing, all rounds together
_TRIMMED = 2  # how many of the best candidates from starts of one kind are trimmed
_TIGHT = 0.45  # a budget below this share of the bytes without a budget is tight
_SOFT = 0.6  # the share of annealing rounds in which the budget may be exceeded at a price
_ROUND = 1_000  # ops measured that stand for a round of annealing in steps of many ops, where each takes longer
_CLASSES_WORK = 2_000_000  # ops measured by annealing over classes of similar storages


def auto(workload: Workload, *, swaps: bool = True, work: int = _WORK, seed: int = 0) -> Events:
    """Return events that keep the budget at little cost; the same workload and seed give the same events.

    `work` limits annealing, in ops measured; with 0, the first events that keep the budget are returned. Raises
    `BudgetInfeasible` when none are found: with swaps, only below the floor.
    """
    if workload.host_resident:
        return while_loading(workload, partial(auto, swaps=swaps, work=work, seed=seed), swaps=swaps, search=bool(work))
    search = DecisionSearch(workload, swaps=swaps)
    start = search.start()
    if start.area == 0:
        return search.events(start)
    if len(workload.graph.ops) >= MANY_OPS:
        tight, rounds = workload.budget < _TIGHT * start.peak, work // _ROUND
        ways = decide_classes(search, start, _EXPONENTS, tight=tight, rounds=rounds, seed=seed)
        return _fastest(workload, ways, swaps=swaps)
    found = [fitted for a in _EXPONENTS if (fitted := descend(search, start, a))]
    blocks = _from_classes(search, start, work=min(work, _CLASSES_WORK), seed=seed)
    if (found or blocks) and not work:
        return search.events(min(found + blocks, key=lambda d: d.seconds))
    others, seeds = seeded(search, quick=not work)
    found += [
        fitted
        for origin in seeds
        for a in _EXPONENTS[: 2 if origin.area else 1]
        if (fitted := descend(search, origin, a))
    ]
    if found and workload.budget < _TIGHT * start.peak:  # a start that evicts everything may lead to better events
        found += _from_below(search, (RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    if not found and not blocks:  # try again with the smallest storages too
        search = DecisionSearch(workload, swaps=swaps, least=0.0)
        found += _from_below(search, (TO_HOST, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    improved = [_improved(search, family, work // 2, seed) for family in (found, blocks) if family]
    ways = [search.events(min(improved, key=lambda d: d.seconds))] if improved else []
    return _fastest(workload, [*ways, *others], swaps=swaps)


def _from_classes(search: DecisionSearch, start: Decisions, *, work: int, seed: int) -> list[Decisions]:
    """Return the descents from states in which all storages of a class are treated in the same way."""
    classes = storage_classes(search)
    coarse = [descend_classes(search, start, a, classes) for a in _EXPONENTS]
    if work:
        walks = [anneal_walk(search, one, classes, work=work // len(coarse), seed=seed, soft=1.0) for one in coarse]
        coarse += [state for walk in walks for state in (walk.best, walk.last) if state is not None]
    return [fitted for state in coarse if (fitted := descend(search, state, 1.0))]


def _fastest(workload: Workload, ways: Sequence[Events], *, swaps: bool) -> Events:
    """Return the fastest of these events, or else of policies that offload. Raises `BudgetInfeasible` if none exist."""
    if not ways and swaps:
        ways = list(_last_resorts(workload))
    if not ways:
        raise infeasible(workload)
    return min(ways, key=lambda events: measure(workload, events).seconds)


def _last_resorts(workload: Workload) -> Iterator[Events]:
    """Yield events of policies that offload on demand; `flow` finds events within the budget whenever they exist."""
    for policy in (delta, flow):
        with suppress(BudgetInfeasible):
            events = policy(workload)
            if measure(workload, events).peak <= workload.budget:
                yield events


def _from_below(search: DecisionSearch, wanted: Sequence[int]) -> list[Decisions]:
    """Return the descents from states in which every storage is treated in the same of the `wanted` ways."""
    return [fitted for low in drastic(search, wanted) if (fitted := descend(search, low, 1.0))]


def _improved(search: DecisionSearch, found: list[Decisions], work: int, seed: int) -> Decisions:
    promising = sorted(found, key=lambda d: d.seconds)[:_TRIMMED]
    best = min((trimmed(search, one) for one in promising), key=lambda d: d.seconds)
    return annealed(search, best, work=work, seed=seed)


def recompute(workload: Workload, *, work: int = _WORK, seed: int = 0) -> Events:
    """Return the events of `auto` without copies to the host."""
    return auto(workload, swaps=False, work=work, seed=seed)


def trimmed(search: DecisionSearch, state: Decisions) -> Decisions:
    """Return the state without the decisions that the budget does not need (reverse-delete).

    The most expensive decisions are tried first. Storages that would be recomputed although there is room for them
    are kept instead.
    """
    for _ in range(3):
        before = state.seconds
        state = _saved(search, state)
        taken = np.flatnonzero(state.decision != UNDECIDED)
        kept = {int(s): search.after(state, Move(int(s), UNDECIDED, -1)) for s in taken}
        for s in sorted(kept, key=lambda s: kept[s].seconds):
            without = search.after(state, Move(s, UNDECIDED, -1))
            if without.area == 0 and without.seconds <= state.seconds:
                state = without
        if state.seconds >= before:
            break
    return state


def _saved(search: DecisionSearch, state: Decisions) -> Decisions:
    """Return the state in which each storage is kept (PIN) where that makes the step faster within the budget."""
    for moves in search.moves:
        move = moves[-1]
        if move.decision == PIN and state.decision[move.storage] == UNDECIDED:
            after = search.after(state, move)
            if after.area == 0 and after.seconds < state.seconds:
                state = after
    return state


def annealed(search: DecisionSearch, state: Decisions, *, work: int, seed: int) -> Decisions:
    """Return the best state within the budget that a random walk over one or two decisions at a time finds."""
    walk = anneal_walk(search, state, singles(search), work=work, seed=seed, soft=_SOFT)
    return state if walk.best is None or walk.best is state else trimmed(search, walk.best)
