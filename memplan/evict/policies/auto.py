"""The default policy: a greedy search by bytes saved per second, then reverse-delete and annealing.

Every candidate decision (recompute a storage once, or before every use; offload it) is measured exactly by simulating
the bytes of the whole step, not estimated. The gain of a decision is how much it reduces the area of live bytes above
the budget, not the peak: the area falls even while another step still holds the peak (`../search.py`). Reverse-delete
then takes back decisions that are not needed, and annealing varies one or two decisions at a time.

Decisions are those of classes of similar storages, and of parts of them: a model repeats its blocks, and a search over
single storages would take half an hour for a model of 80 of them. The result of a descent depends on its start: the
activation checkpoints of the model are one, so that no budget that they keep leads to a slower step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies.checkpoint import checkpoint, with_blocks
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
    storage_classes,
    trimmed,
)
from memplan.evict.search_kernel import RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE, TO_HOST
from memplan.evict.workload import Events, Policy, Workload, infeasible

EXPONENTS = (1.0, 0.5)  # a gain is bytes saved / seconds ** exponent
WORK = 4_000_000  # ops measured by annealing, at most a thousand of them for each round
_TRIMMED = 2  # how many of the best candidates are trimmed
_TIGHT = 0.45  # a budget below this share of the bytes without a budget is tight
PARTS = 8  # of a class, which are decided one by one too
_WALKS = 8  # how many times less work each walk over classes gets than the one over parts of them


def auto(workload: Workload, *, swaps: bool = True, work: int = WORK, seed: int = 0) -> Events:
    """Return events that keep the budget at little cost; the same workload and seed give the same events.

    `work` limits annealing, in ops measured; with 0, the first events that keep the budget are returned. Raises
    `BudgetInfeasible` when none are found: with swaps, only below the floor.
    """
    if workload.host_resident:
        inner = partial(auto, swaps=swaps, work=work, seed=seed)
        return while_loading(workload, inner, swaps=swaps, search=bool(work))
    search = DecisionSearch(workload, swaps=swaps)
    start = search.start()
    if start.area == 0:
        return search.events(start)
    classes = storage_classes(search)
    parts = parts_of(classes, PARTS)
    followed = list(_followed(search))
    starts = [decisions_of(search, events) for events in followed]
    if workload.budget < _TIGHT * start.peak:
        starts += drastic(search, (TO_HOST, RECOMPUTE_EACH_TIME, RECOMPUTE_ONCE))
    ways = [(start, a, classes) for a in EXPONENTS]
    if work:
        starts += _coarse(search, start, classes, work=work // _WALKS, seed=seed)
        ways += [(start, a, parts) for a in EXPONENTS]
    ways += [(one, EXPONENTS[0], classes) for one in starts if np.isfinite(one.area)]
    found = [fitted for origin, a, choices in ways if (fitted := descend(search, origin, a, choices))]
    kept = [events for events in followed if measure(workload, events).peak <= workload.budget]
    if found:
        best = improve(search, found, parts, work=work, seed=seed) if work else min(found, key=_seconds)
        kept.insert(0, search.events(best))
    if not kept:
        kept += on_demand(workload)
    if not kept and swaps:
        kept += (events for policy in (delta, flow) for events in _within(workload, policy))
    if not kept:
        raise infeasible(workload)
    return min(kept, key=lambda events: measure(workload, events).seconds)


def recompute(workload: Workload, *, work: int = WORK, seed: int = 0) -> Events:
    """Return the events of `auto` without copies to the host."""
    return auto(workload, swaps=False, work=work, seed=seed)


def _coarse(
    search: DecisionSearch, start: Decisions, classes: Sequence[Sequence[Option]], *, work: int, seed: int
) -> list[Decisions]:
    """Return the last states above the budget on descents over classes, and where random walks lead from there."""
    coarse = [descend_classes(search, start, a, classes) for a in EXPONENTS]
    walks = [anneal_walk(search, one, classes, work=work, seed=seed, soft=1.0) for one in coarse]
    return coarse + [state for walk in walks for state in (walk.best, walk.last) if state is not None]


def _followed(search: DecisionSearch) -> Iterator[Events]:
    """Yield the events of DTR, and those of the model's checkpoints, whether they keep the budget or not.

    A model without any gets one around each of its blocks, as one writes by hand.
    """
    yield from _tried(search.workload, dtr)
    yield checkpoint(with_blocks(search.workload))


def _tried(workload: Workload, policy: Policy) -> Iterator[Events]:
    """Yield the events of a policy, if it finds any."""
    with suppress(BudgetInfeasible):
        yield policy(workload)


def _within(workload: Workload, policy: Policy) -> Iterator[Events]:
    """Yield the events of a policy if they keep the budget."""
    return (events for events in _tried(workload, policy) if measure(workload, events).peak <= workload.budget)


def improve(
    search: DecisionSearch, found: Sequence[Decisions], parts: Sequence[Sequence[Option]], *, work: int, seed: int
) -> Decisions:
    """Return the best of these states within the budget after reverse-delete and a random walk over `parts`."""
    best = min((trimmed(search, one) for one in sorted(found, key=_seconds)[:_TRIMMED]), key=_seconds)
    walk = anneal_walk(search, best, parts, work=work, seed=seed, soft=0.0)
    return best if walk.best is None or walk.best is best else trimmed(search, walk.best)


def _seconds(state: Decisions) -> float:
    return state.seconds
