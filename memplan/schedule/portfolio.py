"""`auto`: repairs the traced order by minimum cuts, and searches for a better one, until an order is proven optimal.

The result is never worse than the traced order, and is the traced order if no other is better. All limits count work,
so that a graph gets the same schedule on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memplan.core.graph import Graph
from memplan.core.schedule import Schedule
from memplan.schedule.graph_arrays import GraphArrays, make_graph_arrays, step_bytes
from memplan.schedule.ideals import Narrowed, narrow, unsearched, widest
from memplan.schedule.prover import Prover, repair

_NARROW = (8, 64)  # states
_WIDE = (64, 512, 4096, 16384)


def portfolio(graph: Graph) -> Schedule:
    """Return the schedule with the smallest max live found by cut repair and a bounded search."""
    arrays = make_graph_arrays(graph)
    prover = Prover(arrays, _cut_work(arrays))
    best, name = arrays.traced, "traced"
    peak = int(step_bytes(arrays, best).max(initial=0))
    if peak > prover.bound:
        repaired = repair(arrays, best, prover.cut_at)
        if (needs := int(step_bytes(arrays, repaired).max())) < peak:
            best, name, peak = repaired, "traced + repair", needs
    if peak > prover.bound:
        prover.raise_bound(best)
    if peak > prover.bound:
        found = _searched(graph, arrays, unsearched(arrays, best, prover.bound, _search_work(arrays)))
        prover.searched(found.bound)
        if found.max_live < peak:
            best, name = found.order, "search"
    return prover.schedule(graph, best, name)


def _searched(graph: Graph, arrays: GraphArrays, start: Narrowed) -> Narrowed:
    """Return the best order and bound after ever wider searches.

    Narrow searches come first. Then the small storages are left out, which give a search many choices for a few bytes.
    If that leaves a gap of more than those few bytes, wide searches with all storages follow.
    """
    found = _widened(arrays, replace(start, left=start.left // 4), _NARROW)
    found = replace(found, left=found.left + start.left - start.left // 4)
    rough = _rough(graph, arrays, found.max_live)
    if rough is not None and found.max_live > found.bound:
        without = _widened(rough, unsearched(rough, found.order, found.bound, found.left), _WIDE)
        found = replace(found, bound=max(found.bound, without.bound), left=without.left)
        needs = int(step_bytes(arrays, without.order).max())
        if needs < found.max_live:
            found = replace(found, order=without.order, max_live=needs)
        if without.max_live == without.bound:
            return found  # the remaining gap is a few bytes of small storages
    return _widened(arrays, found, _WIDE) if found.max_live > found.bound else found


def _rough(graph: Graph, arrays: GraphArrays, peak: int) -> GraphArrays | None:
    """Return the arrays without the smallest storages, together at most a thousandth of `peak`; None if those are none
    or all.
    """
    sizes = np.sort(arrays.size)
    out = int(np.searchsorted(np.cumsum(sizes), peak // 1000, side="right"))
    return make_graph_arrays(graph, least=int(sizes[out])) if 0 < out < len(sizes) else None


def _widened(arrays: GraphArrays, found: Narrowed, widths: Sequence[int]) -> Narrowed:
    """Search with growing width, until max live equals the bound or the work limit is reached."""
    for width in widths:
        if found.max_live == found.bound or found.left <= 0:
            break
        found = narrow(arrays, found, width=min(width, widest(arrays)))
    return found


def _cut_work(arrays: GraphArrays) -> int:
    return 6_000 * arrays.n  # 2 to 10 ns each


def _search_work(arrays: GraphArrays) -> int:
    return max(64_000_000, 8_000 * arrays.n)  # 2 to 20 ns each
