"""`auto`: repairs the traced order by minimum cuts, and lists the ops anew, until an order is proven optimal.

The result is never worse than the traced order, and is the traced order if no other is better. The limit counts work,
so that a graph gets the same schedule on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.cut import Cut, cut
from memplan.schedule.graph_arrays import GraphArrays, Ints, make_graph_arrays, step_bytes

WORK = 6_000  # arcs of cuts for each op, 2 to 10 ns each


def auto(graph: Graph) -> Schedule:
    """Return the schedule with the smallest max live found by listing the ops and cut repair."""
    arrays = make_graph_arrays(graph)
    prover = Prover(arrays, WORK * arrays.n)
    best, name = arrays.traced, "traced"
    peak = int(step_bytes(arrays, best).max(initial=0))
    for policy, order in _orders(arrays):
        if peak <= prover.bound:
            break
        repaired = repair(arrays, order, prover.cut_at)
        if (needs := int(step_bytes(arrays, repaired).max())) < peak:
            best, name, peak = repaired, f"{policy} + repair", needs
        prover.raise_bound(best)
    return prover.schedule(graph, best, name)


def _orders(arrays: GraphArrays) -> Iterator[tuple[str, Ints]]:
    """Yield the orders to repair, the traced one first."""
    yield "traced", arrays.traced
    yield "frees first", listed(arrays)
    yield "least first", listed(arrays, least=True)
    yield "least last", listed(arrays, least=True, backwards=True)
    yield "latest first", listed(arrays, latest=True)


def listed(arrays: GraphArrays, *, least: bool = False, latest: bool = False, backwards: bool = False) -> Ints:
    """Return the order in which the best of the ready ops runs next: one that frees at least what it allocates.

    Ties go by the traced order, or, with `least`, by the bytes that an op allocates first. With `latest`, one that
    became ready, or able to free more, last runs next: what was begun is ended first. With `backwards`, time is
    reversed: the last op is chosen first.
    """
    before, after, touch, user = (
        [flat[i:j].tolist() for i, j in pairwise(ptr.tolist())]
        for ptr, flat in (
            *((arrays.pred_ptr, arrays.pred), (arrays.succ_ptr, arrays.succ)),
            *((arrays.touch_ptr, arrays.touch), (arrays.user_ptr, arrays.user)),
        )
    )
    if backwards:
        before, after = after, before
    size, kept = arrays.size.tolist(), arrays.kept.tolist()
    born = [bool(keep) and backwards for keep in kept]
    left = [len(ops) + (keep and not backwards) for ops, keep in zip(user, kept, strict=True)]
    waiting = list(map(len, before))
    heap: list[tuple[int, int, int]] = []

    def push(op: int) -> None:
        allocated = sum(size[s] for s in touch[op] if not born[s])
        freed = sum(size[s] for s in touch[op] if left[s] == 1)
        first = -len(found) if latest else allocated > freed
        heapq.heappush(heap, (first, allocated * least, -op if backwards else op))

    found: dict[int, None] = {}
    for op, count in enumerate(waiting):
        if not count:
            push(op)
    while heap:
        op = abs(heapq.heappop(heap)[2])
        if op in found:  # it became better meanwhile
            continue
        found[op] = None
        better = list(after[op])
        for following in after[op]:
            waiting[following] -= 1
        for s in touch[op]:
            left[s] -= 1
            better += user[s] if left[s] == 1 or not born[s] else ()
            born[s] = True
        for other in dict.fromkeys(better):
            if not waiting[other] and other not in found:
                push(other)
    return np.array(list(found)[:: -1 if backwards else 1], np.int64)


class Prover:
    """Keeps the highest lower bound of max live over all legal orders, its evidence, and every cut that was computed.

    Cuts are computed up to a limit of work, in arcs visited, so that the result depends on the graph alone.
    """

    def __init__(self, arrays: GraphArrays, work: int) -> None:
        self.arrays = arrays
        self.work = work
        self.bound = int(arrays.working_set.max(initial=0))
        self.evidence = Evidence.WORKING_SET
        self.op = int(arrays.working_set.argmax()) if arrays.n else 0
        self._cuts: dict[int, Cut] = {}

    def cut_at(self, op: int) -> Cut | None:
        """Return the minimum cut at `op`, or None if the work limit is reached."""
        if op in self._cuts:
            return self._cuts[op]
        if self.work <= 0:
            return None
        found = cut(self.arrays, op)
        self.work -= found.work
        self._cuts[op] = found
        if found.bytes > self.bound:
            self.bound, self.op = found.bytes, op
            self.evidence = Evidence.BETWEEN if op == self.arrays.barrier else Evidence.CUT
        return found

    def raise_bound(self, order: Ints) -> None:
        """Compute cuts at the steps where `order` needs the most bytes, as long as they could raise the bound.

        The cut at an op is at most the bytes that `order` needs there, so cuts at other steps cannot raise it.
        """
        steps = step_bytes(self.arrays, order)
        for step in (-steps).argsort(kind="stable"):
            if steps[step] <= self.bound or self.cut_at(int(order[step])) is None:
                return

    def schedule(self, graph: Graph, order: Ints, policy: str) -> Schedule:
        """Return the schedule of `order`, with the bound proven over all orders."""
        at_an_op = self.evidence in (Evidence.CUT, Evidence.WORKING_SET) and graph.ops
        proof = graph.ops[self.arrays.graph_op(self.op)].name if at_an_op else ""
        return Schedule(
            policy=policy,
            order=self.arrays.graph_order(order),
            max_live=int(step_bytes(self.arrays, order).max(initial=0)),
            bound=self.bound,
            evidence=self.evidence,
            proof=proof,
        )


_ROUNDS = 200
_TRIED = 8  # peak steps tried in one round; an order can have thousands


def repair(arrays: GraphArrays, order: Ints, cut_at: Callable[[int], Cut | None]) -> Ints:
    """Return the order, repaired at its peak steps as long as (max live, number of steps that reach it) becomes
    smaller.

    For a peak at op v whose minimum cut is below the peak, the new order is: the cut's ideal, v, the rest, each in the
    old order. Repair stops when the cut equals the peak (no order is better) or `cut_at` returns None (no work left).
    """
    steps = step_bytes(arrays, order)
    for _ in range(_ROUNDS):
        better = _repaired(arrays, order, steps, cut_at)
        if better is None:
            return order
        order = better
        steps = step_bytes(arrays, order)
    return order


def _repaired(arrays: GraphArrays, order: Ints, steps: Ints, cut_at: Callable[[int], Cut | None]) -> Ints | None:
    peak = steps.max(initial=0)
    at_peak = np.flatnonzero(steps == peak)
    for step in at_peak[:_TRIED]:
        found = cut_at(int(order[step]))
        if found is None or found.bytes >= peak:
            return None
        before, late = found.ideal[order], order != found.op
        candidate = np.concatenate((order[before], [found.op], order[~before & late]))
        now = step_bytes(arrays, candidate)
        if (now.max(), int((now == now.max()).sum())) < (peak, len(at_peak)):
            return candidate
    return None
