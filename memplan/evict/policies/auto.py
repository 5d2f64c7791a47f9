"""The default policy: a greedy search by bytes saved per second, then reverse-delete and annealing.

Every candidate decision (recompute a storage once, or before every use; offload it) is measured exactly by simulating
the bytes of the whole step, not estimated. The gain of a decision is how much it reduces the area of live bytes above
the budget, not the peak: the area falls even while another step still holds the peak (`../search.py`). Reverse-delete
then takes back decisions that are not needed, and annealing varies one or two decisions at a time.

The result of a descent depends on its start: under a tight budget, a plan that recomputes whole chains on demand is
better than what single decisions lead to from a step that keeps everything. So the decisions of published policies are
further starts, and the activation checkpoints of the model, so that no budget that they keep leads to a slower step.

Measuring a step takes time in proportion to its ops, and a search over single storages measures it in proportion to its
storages: what takes seconds for some hundred ops would take half an hour for a model of 80 blocks. Steps of many ops
get a search over classes of similar storages, and parts of them, from the same starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies.capuchin import guided
from memplan.evict.policies.checkpoint import checkpoint
from memplan.evict.policies.delta import delta
from memplan.evict.policies.dtr import dtr, on_demand
from memplan.evict.policies.flow import flow
from memplan.evict.policies.loading import while_loading
from memplan.evict.search import (
    Decisions,
    DecisionSearch,
    Option,
    anneal_walk,
    decisions_of,
    descend,
    descend_classes,
    drastic,
    parts_of,
    singles,
    storage_classes,
    trimmed,
)
from memplan.evict.search_kernel import RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE, TO_HOST
from memplan.evict.workload import Events, Workload, infeasible

MANY_OPS = 2_500  # from here on, classes of storages are decided instead of single ones
_EXPONENTS = (1.0, 0.5)  # a gain is bytes saved / seconds ** exponent
_WORK = 4_000_000  # ops measured by annealing, all rounds together
_TRIMMED = 2  # how many of the best candidates from starts of one kind are trimmed
_TIGHT = 0.45  # a budget below this share of the bytes without a budget is tight
_SOFT = 0.6  # the share of annealing rounds in which the budget may be exceeded at a price
_ROUND = 1_000  # ops measured that stand for a round of annealing in steps of many ops, where each takes longer
_CLASSES_WORK = 2_000_000  # ops measured by annealing over classes of similar storages
_PARTS = 8  # of a class, which are decided one by one too
_WALKS = 8  # how many times less work each walk over classes gets than the one over parts of them
_GUIDED_WORK = 4_000_000  # ops measured for Capuchin's decisions: enough for all of them on some thousand ops


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
    tight = workload.budget < _TIGHT * start.peak
    by_classes = len(workload.graph.ops) >= MANY_OPS
    ways = (_by_classes if by_classes else _by_storages)(search, start, tight=tight, work=work, seed=seed)
    if not ways and swaps:
        ways = list(_last_resorts(workload))
    if not ways:
        raise infeasible(workload)
    return min(ways, key=lambda events: measure(workload, events).seconds)


def recompute(workload: Workload, *, work: int = _WORK, seed: int = 0) -> Events:
    """Return the events of `auto` without copies to the host."""
    return auto(workload, swaps=False, work=work, seed=seed)


def _by_storages(search: DecisionSearch, start: Decisions, *, tight: bool, work: int, seed: int) -> list[Events]:
    """Return events that keep the budget, by decisions about single storages; none if no way is found."""
    found = [fitted for a in _EXPONENTS if (fitted := descend(search, start, a))]
    each = min(work, _CLASSES_WORK) // len(_EXPONENTS)
    coarse = _coarse(search, start, storage_classes(search), work=each, seed=seed)
    blocks = [fitted for state in coarse if (fitted := descend(search, state, 1.0))]
    if (found or blocks) and not work:
        return [search.events(min(found + blocks, key=lambda d: d.seconds))]
    others, seeds = _seeded(search, quick=not work)
    found += [
        fitted
        for origin in seeds
        for a in _EXPONENTS[: 2 if origin.area else 1]
        if (fitted := descend(search, origin, a))
    ]
    if found and tight:  # a start that evicts everything may lead to better events
        found += _from_below(search, (RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    if not found and not blocks:  # try again with the smallest storages too
        search = DecisionSearch(search.workload, swaps=search.swaps, least=0.0)
        found += _from_below(search, (TO_HOST, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    improved = [improve(search, family, work=work // 2, seed=seed) for family in (found, blocks) if family]
    return [search.events(min(improved, key=lambda d: d.seconds)), *others] if improved else list(others)


def _by_classes(search: DecisionSearch, start: Decisions, *, tight: bool, work: int, seed: int) -> list[Events]:
    """Return events that keep the budget, by decisions about classes of storages; none if no way is found."""
    work = work // _ROUND * (len(search.workload.graph.ops) + 1)
    classes = storage_classes(search)
    parts = parts_of(classes, _PARTS)
    others, seeds = _seeded(search, quick=True)
    starts = [*seeds, *(drastic(search, (TO_HOST, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE)) if tight else ())]
    ways = [(start, a, classes) for a in _EXPONENTS]
    if work:
        others = (*others, *on_demand(search.workload))
        starts += _coarse(search, start, classes, work=work // _WALKS, seed=seed)
        ways += [(start, a, parts) for a in _EXPONENTS]
    ways += [(one, _EXPONENTS[0], classes) for one in starts]
    found = [fitted for origin, a, choices in ways if (fitted := descend(search, origin, a, choices))]
    if not found:
        return list(others)
    best = min(found, key=lambda d: d.seconds)
    if work:
        best = improve(search, found, parts, work=work, seed=seed)
    return [search.events(best), *others]


def _coarse(
    search: DecisionSearch, start: Decisions, classes: Sequence[Sequence[Option]], *, work: int, seed: int
) -> list[Decisions]:
    """Return the last states above the budget on descents over classes, and where random walks lead from there."""
    coarse = [descend_classes(search, start, a, classes) for a in _EXPONENTS]
    if work:
        walks = [anneal_walk(search, one, classes, work=work, seed=seed, soft=1.0) for one in coarse]
        coarse += [state for walk in walks for state in (walk.best, walk.last) if state is not None]
    return coarse


def _seeded(search: DecisionSearch, *, quick: bool = False) -> tuple[tuple[Events, ...], tuple[Decisions, ...]]:
    """Return (events of `on_demand` and of checkpoints that keep the budget; start states, which may exceed it).

    The start states are DTR's and Capuchin's decisions, and those of checkpoints. `quick`: leave out `on_demand`, and
    Capuchin's decisions, which take longer than DTR's.
    """
    workload = search.workload
    checkpointed = any(op.checkpoint for op in workload.graph.ops)
    states: list[Decisions] = []
    kept = [] if quick else list(on_demand(workload))
    for policy in (dtr, checkpoint) if checkpointed else (dtr,):
        with suppress(BudgetInfeasible):
            events = policy(workload)
            states.append(decisions_of(search, events))
            if measure(workload, events).peak <= workload.budget:
                kept.append(events)
    if not quick:
        state = guided(search, evaluations=_GUIDED_WORK // (len(workload.graph.ops) + 1))
        again = decisions_of(search, search.events(state))  # recomputes each time what runs repeatedly
        states += [state, again]
    return tuple(kept), tuple(state for state in states if np.isfinite(state.area))


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


def improve(
    search: DecisionSearch,
    found: Sequence[Decisions],
    parts: Sequence[Sequence[Option]] = (),
    *,
    work: int,
    seed: int,
) -> Decisions:
    """Return the best of these states within the budget after reverse-delete and a random walk.

    Both vary one or two decisions at a time, or, with `parts`, those of parts of classes.
    """
    classes = bool(parts)
    promising = sorted(found, key=lambda d: d.seconds)[:_TRIMMED]
    best = min((trimmed(search, one, classes=classes) for one in promising), key=lambda d: d.seconds)
    walk = anneal_walk(search, best, parts or singles(search), work=work, seed=seed, soft=0.0 if classes else _SOFT)
    return best if walk.best is None or walk.best is best else trimmed(search, walk.best, classes=classes)
