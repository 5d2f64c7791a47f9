"""Keeps the proofs about one graph: the highest lower bound, its evidence, and every cut that was computed."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule
from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, step_bytes
from memplan.schedule.bounds.cut import Cut, cut


class Prover:
    """Computes cuts up to a work limit, in arcs visited, so that the result depends on the graph alone."""

    def __init__(self, core: GraphArrays, work: int) -> None:
        self.core = core
        self.work = work
        self.bound = int(core.working_set.max(initial=0))
        self.evidence = Evidence.WORKING_SET
        self.op = int(core.working_set.argmax()) if core.n else 0
        self._cuts: dict[int, Cut] = {}

    def cut_at(self, op: int) -> Cut | None:
        """Return the minimum cut at `op`, or None if the work limit is reached."""
        if op in self._cuts:
            return self._cuts[op]
        if self.work <= 0:
            return None
        found = cut(self.core, op)
        self.work -= found.work
        self._cuts[op] = found
        if found.bytes > self.bound:
            self.bound, self.op = found.bytes, op
            self.evidence = Evidence.BETWEEN if op == self.core.barrier else Evidence.CUT
        return found

    def searched(self, bound: int, evidence: Evidence = Evidence.SEARCH) -> None:
        """Record that a search excluded all orders below `bound` bytes."""
        if bound > self.bound:
            self.bound, self.evidence = bound, evidence

    def raise_bound(self, order: Ints) -> None:
        """Compute cuts at the steps where `order` needs the most bytes, as long as they could raise the bound.

        The cut at an op is at most the bytes that `order` needs there, so cuts at other steps cannot raise it.
        """
        steps = step_bytes(self.core, order)
        for step in (-steps).argsort(kind="stable"):
            if steps[step] <= self.bound or self.cut_at(int(order[step])) is None:
                return

    def schedule(self, graph: Graph, order: Ints, policy: str) -> Schedule:
        """Return the schedule of `order`, with the bound proven over all orders."""
        at_an_op = self.evidence in (Evidence.CUT, Evidence.WORKING_SET) and graph.ops
        proof = graph.ops[self.core.graph_op(self.op)].name if at_an_op else ""
        return Schedule(
            policy=policy,
            order=self.core.graph_order(order),
            max_live=int(step_bytes(self.core, order).max(initial=0)),
            bound=self.bound,
            evidence=self.evidence,
            proof=proof,
        )
