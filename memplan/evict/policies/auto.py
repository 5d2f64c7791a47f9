"""The default policy: greedy by bytes won per second, judged exactly; then what is not needed is taken back.

Every candidate decision (compute a storage again once, or every time; send it to the host) is judged by running
the whole step on numbers of bytes, so that no estimate is wrong. What a decision wins is the area of live bytes
above the budget, not the peak: an area falls even while another step still holds the peak (`descent.py`). Then
reverse-delete, and annealing over one or two decisions. What published policies decide is a start too (`seeds.py`).
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
from memplan.evict.policies.seeds import seeded
from memplan.evict.search.decisions import AGAIN, KEEP, ONCE, SAVE, SWAP, Decisions, DecisionSearch, Move
from memplan.evict.search.descent import alike, descend, descend_alike, singles, walk
from memplan.evict.working_set import infeasible
from memplan.evict.workload import Workload

_EXPONENTS = (1.0, 0.5)  # of the seconds, by which the bytes won are divided
_WORK = 4_000_000  # ops judged by annealing, all rounds together
_TRIMMED = 2  # of the ways found from starts of one kind, so many are looked at closely
_TIGHT = 0.45  # of the bytes without a budget
_SOFT = 0.6  # of the rounds of annealing, in which the budget has a price
_ALIKE_WORK = 2_000_000  # ops judged by annealing over classes of alike storages


def auto(workload: Workload, *, swaps: bool = True, work: int = _WORK, seed: int = 0) -> Events:
    """Events that keep the budget at little cost. The same workload and seed, the same events.

    `work` is how long annealing may last, in ops judged; with 0, any way will do. Raises `BudgetInfeasible` when no
    way is found: with swaps, below the floor only.
    """
    if workload.streamed:
        return while_loading(workload, partial(auto, swaps=swaps, work=work, seed=seed), swaps=swaps, search=bool(work))
    search = DecisionSearch(workload, swaps=swaps)
    start = search.start()
    if start.area == 0:
        return search.events(start)
    found = [fitted for a in _EXPONENTS if (fitted := descend(search, start, a))]
    blocks = _from_alike(search, start, work=min(work, _ALIKE_WORK), seed=seed)
    if (found or blocks) and not work:
        return search.events(min(found + blocks, key=lambda d: d.seconds))
    on_demand, seeds = seeded(search, quick=not work)
    found += [
        fitted
        for origin in seeds
        for a in _EXPONENTS[: 2 if origin.area else 1]
        if (fitted := descend(search, origin, a))
    ]
    if found and workload.budget < _TIGHT * start.peak:  # from below there may be a better way
        found += _from_below(search, (AGAIN, ONCE))
    if not found and not blocks:  # or one at all, where the smallest storages count too
        search = DecisionSearch(workload, swaps=swaps, least=0.0)
        found += _from_below(search, (SWAP, AGAIN, ONCE))
    improved = [_improved(search, family, work // 2, seed) for family in (found, blocks) if family]
    ways = [search.events(min(improved, key=lambda d: d.seconds))] if improved else []
    ways += [on_demand] if on_demand is not None else []
    if not ways and swaps:
        ways = list(_last_resorts(workload))
    if not ways:
        raise infeasible(workload)
    return min(ways, key=lambda events: measure(workload, events).seconds)


def _from_alike(search: DecisionSearch, start: Decisions, *, work: int, seed: int) -> list[Decisions]:
    """What is left of treating alike storages alike."""
    classes = alike(search)
    coarse = [descend_alike(search, start, a, classes) for a in _EXPONENTS]
    if work:
        walks = [walk(search, one, classes, work=work // len(coarse), seed=seed, soft=1.0) for one in coarse]
        coarse += [state for walked in walks for state in (walked.best, walked.last) if state is not None]
    return [fitted for state in coarse if (fitted := descend(search, state, 1.0))]


def _last_resorts(workload: Workload) -> Iterator[Events]:
    """Of policies that send away whatever is in the way; flow always finds a way, if there is one."""
    for policy in (delta, flow):
        with suppress(BudgetInfeasible):
            events = policy(workload)
            if measure(workload, events).peak <= workload.budget:
                yield events


def _from_below(search: DecisionSearch, wanted: Sequence[int]) -> list[Decisions]:
    """What is left of treating everything alike."""
    return [fitted for low in drastic(search, wanted) if (fitted := descend(search, low, 1.0))]


def _improved(search: DecisionSearch, found: list[Decisions], work: int, seed: int) -> Decisions:
    promising = sorted(found, key=lambda d: d.seconds)[:_TRIMMED]
    best = min((trimmed(search, one) for one in promising), key=lambda d: d.seconds)
    return annealed(search, best, work=work, seed=seed)


def recompute(workload: Workload, *, work: int = _WORK, seed: int = 0) -> Events:
    """`auto` without copies to the host."""
    return auto(workload, swaps=False, work=work, seed=seed)


def drastic(search: DecisionSearch, ways: Sequence[int]) -> Iterator[Decisions]:
    """Everything that can be is treated alike, in each of these ways."""
    for wanted in ways:
        decision, gap = search.nothing()
        for moves in search.moves:
            for move in moves:
                if move.decision == wanted:
                    decision[move.storage], gap[move.storage] = move.decision, move.gap
        state = search.judged(decision, gap)
        if np.isfinite(state.area):
            yield state


def trimmed(search: DecisionSearch, state: Decisions) -> Decisions:
    """Take back, dearest first, every decision without which the step still fits (reverse-delete); hold what would
    be made again although there is room for it.
    """
    for _ in range(3):
        before = state.seconds
        state = _saved(search, state)
        taken = np.flatnonzero(state.decision != KEEP)
        kept = {int(s): search.after(state, Move(int(s), KEEP, -1)) for s in taken}
        for s in sorted(kept, key=lambda s: kept[s].seconds):
            without = search.after(state, Move(s, KEEP, -1))
            if without.area == 0 and without.seconds <= state.seconds:
                state = without
        if state.seconds >= before:
            break
    return state


def _saved(search: DecisionSearch, state: Decisions) -> Decisions:
    """Hold on to each storage of which that makes the step faster within the budget."""
    for moves in search.moves:
        move = moves[-1]
        if move.decision == SAVE and state.decision[move.storage] == KEEP:
            after = search.after(state, move)
            if after.area == 0 and after.seconds < state.seconds:
                state = after
    return state


def annealed(search: DecisionSearch, state: Decisions, *, work: int, seed: int) -> Decisions:
    """The best that a random walk over one or two decisions at a time finds within the budget."""
    walked = walk(search, state, singles(search), work=work, seed=seed, soft=_SOFT)
    return state if walked.best is None or walked.best is state else trimmed(search, walked.best)
