"""Lower bounds of max live over all legal orders by minimum cuts, and what follows from them.

`Prover` keeps the proofs about one graph: the highest bound, its evidence, and every cut that was computed. `repair`
improves an order at its peak by running first the ops that the minimum cut there has before it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.cut import Cut, cut
from memplan.schedule.graph_arrays import GraphArrays, Ints, step_bytes


class Prover:
    """Computes cuts up to a work limit, in arcs visited, so that the result depends on the graph alone."""

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

    def searched(self, bound: int) -> None:
        """Record that a search excluded all orders below `bound` bytes."""
        if bound > self.bound:
            self.bound, self.evidence = bound, Evidence.SEARCH

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
