"""Checks the bound of a schedule: the bound in a plan file is proven again from its evidence, or is only claimed."""

from __future__ import annotations

from memplan.core.graph import Graph
from memplan.core.schedule import Evidence, Schedule, is_proven_again, working_set
from memplan.errors import InvalidPlan
from memplan.schedule.bounds.cut import cut_bound
from memplan.schedule.select import order


def require_evidence(graph: Graph, schedule: Schedule) -> None:
    """Raise `InvalidPlan` unless the cut or the working set of the op named by `proof` gives the bound.

    The portfolio's search is repeated: its limit is work, not seconds, so it proves the same bound on every machine. A
    long search by another policy is not repeated: see `is_proven_again`.
    """
    if schedule.evidence in (Evidence.SEARCH, Evidence.LONG_SEARCH):
        if schedule.proof:
            raise InvalidPlan("a search names no op", where="schedule.proof")
        if not is_proven_again(schedule):
            return
        proven = order(graph).bound
        if proven < schedule.bound:
            raise InvalidPlan(f"says {schedule.bound}, a search proves {proven}", where="schedule.bound")
        return
    if not graph.ops and not schedule.proof:
        return
    if schedule.evidence is Evidence.BETWEEN:
        if schedule.proof or cut_bound(graph, None) != schedule.bound:
            raise InvalidPlan(f"says {schedule.bound}, its evidence does not prove it", where="schedule.bound")
        return
    index = next((i for i, op in enumerate(graph.ops) if op.name == schedule.proof), None)
    if index is None:
        raise InvalidPlan("names no op of the graph", where="schedule.proof")
    proven = cut_bound(graph, index) if schedule.evidence is Evidence.CUT else working_set(graph)[0]
    if proven != schedule.bound:
        raise InvalidPlan(f"says {schedule.bound}, its evidence gives {proven}", where="schedule.bound")
