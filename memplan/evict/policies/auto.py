"""The default policy: a greedy search by bytes saved per second, then reverse-delete.

Every candidate decision (recompute a storage once, or before every use; offload it) is measured exactly by simulating
the bytes of the whole step, not estimated. The gain of a decision is how much it reduces the area of live bytes above
the budget, not the peak: the area falls even while another step still holds the peak (`../search.py`). Reverse-delete
then takes back decisions that are not needed.

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
    decisions_of,
    descend,
    descents,
    parts_of,
    storage_classes,
    trimmed,
)
from memplan.evict.workload import Events, Policy, Workload, infeasible

EXPONENTS = (1.0, 0.5)  # a gain is bytes saved / seconds ** exponent
_TRIMMED = 2  # how many of the best candidates are trimmed
PARTS = 8  # of a class, which are decided one by one too


def auto(workload: Workload, *, swaps: bool = True, quick: bool = False) -> Events:
    """Return events that keep the budget at little cost; the same workload gives the same events.

    `quick`: the first ones that keep it are taken. Raises `BudgetInfeasible` when none are found: with swaps, only
    below the floor.
    """
    if workload.host_resident:
        return while_loading(workload, partial(auto, swaps=swaps, quick=quick), swaps=swaps, search=not quick)
    search = DecisionSearch(workload, swaps=swaps)
    start = search.start()
    if start.area == 0:
        return search.events(start)
    classes = storage_classes(search)
    followed = list(_followed(search))
    starts = [decisions_of(search, events) for events in followed]
    descended = descents(search, start, EXPONENTS, classes)
    if not quick:
        starts += [last for _, last in descended]
        descended += descents(search, start, EXPONENTS, parts_of(classes, PARTS))
    possible = [fitted for fitted, _ in descended]
    possible += [descend(search, one, EXPONENTS[0], classes) for one in starts if np.isfinite(one.area)]
    found = list(filter(None, possible))
    kept = [events for events in followed if measure(workload, events).peak <= workload.budget]
    if found:
        best = min(found, key=_seconds) if quick else improve(search, found)
        kept.insert(0, search.events(best))
    if not kept:
        kept += on_demand(workload)
    if not kept and swaps:
        kept += (events for policy in (delta, flow) for events in _within(workload, policy))
    if not kept:
        raise infeasible(workload)
    return min(kept, key=lambda events: measure(workload, events).seconds)


def recompute(workload: Workload, *, quick: bool = False) -> Events:
    """Return the events of `auto` without copies to the host."""
    return auto(workload, swaps=False, quick=quick)


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


def improve(search: DecisionSearch, found: Sequence[Decisions]) -> Decisions:
    """Return the best of these states within the budget after reverse-delete."""
    return min((trimmed(search, one) for one in sorted(found, key=_seconds)[:_TRIMMED]), key=_seconds)


def _seconds(state: Decisions) -> float:
    return state.seconds
