"""`auto`: tries the policies one after another, each improved by cut repair, until an order is proven optimal.

The result is never worse than the traced order, and is the traced order if no other is better. All limits count work,
so that a graph gets the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, make_core, step_bytes
from memplan.schedule.bounds.propagate import propagate
from memplan.schedule.bounds.prover import Prover
from memplan.schedule.bounds.repair import repair
from memplan.schedule.policies.list_policies import RULES, listed
from memplan.schedule.search.ideals import Narrowed, narrow, unsearched, widest

_NARROW = (8, 64)  # states
_WIDE = (64, 512, 4096, 16384)


def portfolio(graph: Graph) -> Schedule:
    """Return the schedule with the smallest max live found by the policies, cut repair and a bounded search."""
    core = make_core(graph)
    prover = Prover(core, _cut_work(core))
    best, name, peak = _best_policy(core, prover)
    if peak > prover.bound:
        prover.raise_bound(best)
    if peak > prover.bound:
        found = _searched(graph, core, unsearched(core, best, prover.bound, _search_work(core)))
        prover.searched(found.bound)
        if found.max_live < peak:
            best, name = found.order, "search"
    return prover.schedule(graph, best, name)


def _best_policy(core: GraphArrays, prover: Prover) -> tuple[Ints, str, int]:
    """Return the best order of the policies, with and without repair, its name and its max live.

    Of equal orders, it is the first.
    """
    best, name = core.traced, "traced"
    peak = int(step_bytes(core, best).max(initial=0))
    for policy in ("traced", *RULES):
        if peak == prover.bound:
            break
        order = core.traced if policy == "traced" else listed(core, policy)
        for called in (policy, f"{policy} + repair"):
            needs = int(step_bytes(core, order).max())
            if needs < peak:
                best, name, peak = order, called, needs
            if called == policy and needs > prover.bound:
                order = repair(core, order, prover.cut_at)
    return best, name, peak


def _searched(graph: Graph, core: GraphArrays, start: Narrowed) -> Narrowed:
    """Return the best order and bound after propagation and ever wider searches.

    Narrow searches come first. Then the small storages are left out, which give a search many choices for a few bytes.
    If that leaves a gap of more than those few bytes, wide searches with all storages follow.
    """
    found = _widened(core, replace(start, left=start.left // 4), _NARROW)
    found = replace(found, left=found.left + start.left - start.left // 4)
    rough = _rough(graph, core, found.max_live)
    if rough is not None and found.max_live > found.bound:
        without = _widened(rough, unsearched(rough, found.order, found.bound, found.left), _WIDE)
        found = replace(found, bound=max(found.bound, without.bound), left=without.left)
        needs = int(step_bytes(core, without.order).max())
        if needs < found.max_live:
            found = replace(found, order=without.order, max_live=needs)
        if without.max_live == without.bound:
            return found  # the remaining gap is a few bytes of small storages
    return _widened(core, found, _WIDE) if found.max_live > found.bound else found


def _rough(graph: Graph, core: GraphArrays, peak: int) -> GraphArrays | None:
    """Return the arrays without the smallest storages, together at most a thousandth of `peak`; None if those are none
    or all.
    """
    sizes = np.sort(core.size)
    out = int(np.searchsorted(np.cumsum(sizes), peak // 1000, side="right"))
    return make_core(graph, least=int(sizes[out])) if 0 < out < len(sizes) else None


def _widened(core: GraphArrays, found: Narrowed, widths: Sequence[int]) -> Narrowed:
    """Propagate and search with growing width, until max live equals the bound or the work limit is reached."""
    cut_work, target, narrower = _cut_work(core), 0, core
    for width in widths:
        if found.max_live - 1 != target:
            target = found.max_live - 1
            edges = propagate(narrower, found.order, target, cut_work)
            cut_work = edges.left
            if edges.core is None:
                return replace(found, bound=found.max_live)
            narrower = edges.core
        if found.max_live == found.bound or found.left <= 0:
            break
        found = narrow(narrower, found, width=min(width, widest(core)))
    return found


def _cut_work(core: GraphArrays) -> int:
    return 6_000 * core.n  # 2 to 10 ns each


def _search_work(core: GraphArrays) -> int:
    return max(64_000_000, 8_000 * core.n)  # 2 to 20 ns each
