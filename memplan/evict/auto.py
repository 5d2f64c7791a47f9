"""The default policy: greedy by bytes won per second, judged exactly; then what is not needed is taken back.

Every candidate decision (compute a storage again once, or every time; send it to the host) is judged by running
the whole step on numbers of bytes, so that no estimate is wrong. What a decision wins is the area of live bytes
above the budget, not the peak: an area falls even while another step still holds the peak. Then reverse-delete,
and annealing over one or two decisions. What published policies decide is a start too (`seeds.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.arrays import measure
from memplan.evict.delta import delta
from memplan.evict.events import Events
from memplan.evict.floor import infeasible
from memplan.evict.flow import flow
from memplan.evict.loading import while_loading
from memplan.evict.search import AGAIN, KEEP, ONCE, SAVE, SWAP, Decisions, Move, Search
from memplan.evict.seeds import seeded
from memplan.evict.workload import Workload

_EXPONENTS = (1.0, 0.5)  # of the seconds, by which the bytes won are divided
_CHEAPEST = 1e-9  # seconds: what costs nothing is compared by bytes
_WORK = 4_000_000  # ops judged by annealing, all rounds together
_WALKS = 2  # of annealing, from the best starts
_TRIMMED = 3  # of the ways found, so many are looked at closely
_TIGHT = 0.45  # of the bytes without a budget
_HEAT = 0.1  # the first temperature, in mean costs of one decision


def auto(workload: Workload, *, swaps: bool = True, work: int = _WORK, seed: int = 0) -> Events:
    """Events that keep the budget at little cost. The same workload and seed, the same events.

    `work` is how long annealing may last, in ops judged; with 0, any way will do. Raises `BudgetInfeasible` when no
    way is found: with swaps, below the floor only.
    """
    if workload.streamed:
        return while_loading(workload, partial(auto, swaps=swaps, work=work, seed=seed), swaps=swaps, search=bool(work))
    search = Search(workload, swaps=swaps)
    start = search.start()
    if start.area == 0:
        return search.events(start)
    found = [fitted for a in _EXPONENTS if (fitted := descend(search, start, a))]
    if found and not work:
        return search.events(min(found, key=lambda d: d.seconds))
    on_demand, seeds = seeded(search, quick=not work)
    found += [
        fitted
        for origin in seeds
        for a in _EXPONENTS[: 2 if origin.area else 1]
        if (fitted := descend(search, origin, a))
    ]
    if found and workload.budget < _TIGHT * start.peak:  # from below there may be a better way
        found += _from_below(search, (AGAIN, ONCE))
    if not found:  # or one at all, where the smallest storages count too
        search = Search(workload, swaps=swaps, least=0.0)
        found += _from_below(search, (SWAP, AGAIN, ONCE))
    ways = [search.events(_improved(search, found, work, seed))] if found else []
    ways += [on_demand] if on_demand is not None else []
    if not ways and swaps:
        ways = list(_last_resorts(workload))
    if not ways:
        raise infeasible(workload)
    return min(ways, key=lambda events: measure(workload, events).seconds)


def _last_resorts(workload: Workload) -> Iterator[Events]:
    """Of policies that send away whatever is in the way; flow always finds a way, if there is one."""
    for policy in (delta, flow):
        with suppress(BudgetInfeasible):
            events = policy(workload)
            if measure(workload, events).peak <= workload.budget:
                yield events


def _from_below(search: Search, alike: Sequence[int]) -> list[Decisions]:
    """What is left of treating everything alike."""
    return [fitted for low in drastic(search, alike) if (fitted := descend(search, low, 1.0))]


def _improved(search: Search, found: list[Decisions], work: int, seed: int) -> Decisions:
    promising = sorted(found, key=lambda d: d.seconds)[:_TRIMMED]
    best = sorted((trimmed(search, one) for one in promising), key=lambda d: d.seconds)[:_WALKS]
    return min((annealed(search, one, work=work // _WALKS, seed=seed) for one in best), key=lambda d: d.seconds)


def recompute(workload: Workload, *, work: int = _WORK, seed: int = 0) -> Events:
    """`auto` without copies to the host."""
    return auto(workload, swaps=False, work=work, seed=seed)


def descend(search: Search, state: Decisions, exponent: float) -> Decisions | None:
    """Take the best move until nothing is above the budget; None when no move helps any more.

    Lazy: a move's price is looked at again only when it comes first; prices rarely fall.
    """
    candidates = [move for moves in search.moves for move in moves if move.decision != SAVE]
    queue: list[tuple[float, int]] = []
    fresh = False
    while state.area > 0:
        if not queue:
            if fresh:
                return None
            queue = _priced(search, state, candidates, exponent)
            fresh = True
            if not queue:
                return None
        _, index = heapq.heappop(queue)
        after = search.after(state, candidates[index])
        gain = _gain(state, after, exponent)
        if gain <= 0:
            continue
        if queue and gain < -queue[0][0]:
            heapq.heappush(queue, (-gain, index))
            continue
        state, fresh = after, False
    return state


def drastic(search: Search, alike: Sequence[int]) -> Iterator[Decisions]:
    """Everything that can be is treated alike, in each of these ways."""
    for wanted in alike:
        decision, gap = search.nothing()
        for moves in search.moves:
            for move in moves:
                if move.decision == wanted:
                    decision[move.storage], gap[move.storage] = move.decision, move.gap
        state = search.judged(decision, gap)
        if np.isfinite(state.area):
            yield state


def trimmed(search: Search, state: Decisions) -> Decisions:
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


def _saved(search: Search, state: Decisions) -> Decisions:
    """Hold on to each storage of which that makes the step faster within the budget."""
    for moves in search.moves:
        move = moves[-1]
        if move.decision == SAVE and state.decision[move.storage] == KEEP:
            after = search.after(state, move)
            if after.area == 0 and after.seconds < state.seconds:
                state = after
    return state


def annealed(search: Search, state: Decisions, *, work: int, seed: int) -> Decisions:
    """The best that a random walk over one or two decisions at a time finds within the budget."""
    from memplan.evict.search_kernel import anneal

    rounds = work // (len(search.workload.graph.ops) + 1)
    plain = sum(search.workload.seconds)
    if rounds < 1 or state.seconds <= plain or not search.moves:
        return state
    flat = [move for moves in search.moves for move in moves]
    ptr = np.cumsum([0, *map(len, search.moves)])
    overhead = state.seconds - plain
    chosen = int((state.decision != KEEP).sum()) or 1
    decision, gap, seconds = anneal(
        *(state.decision.copy(), state.gap.copy(), search.workload.budget, state.seconds),
        np.array([(m.storage, m.decision) for m in flat], np.int64),
        np.array([m.gap for m in flat], np.int64),
        *(ptr, rounds, _HEAT * overhead / chosen, overhead / search.start().area, seed),
        *(search.kinds, search.indices, search.extra, search.tables),
    )
    better = search.judged(decision, gap)
    assert better.seconds == seconds
    return trimmed(search, better)


def _priced(search: Search, state: Decisions, moves: Iterable[Move], exponent: float) -> list[tuple[float, int]]:
    """A heap of the moves that win something now, best first; ties by definition order."""
    queue = []
    for index, move in enumerate(moves):
        if state.decision[move.storage] == move.decision:
            continue
        gain = _gain(state, search.after(state, move), exponent)
        if gain > 0:
            queue.append((-gain, index))
    heapq.heapify(queue)
    return queue


def _gain(before: Decisions, after: Decisions, exponent: float) -> float:
    won = before.area - after.area
    if not won > 0:
        return 0.0
    return float(won / max(after.seconds - before.seconds, _CHEAPEST) ** exponent)
