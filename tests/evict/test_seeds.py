"""Where the default policy starts: others' events as decisions, and what follows from starting there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.dtr import dtr
from memplan.evict.workload import floor
from tests.evict.judge import workload_of
from tests.graph_strategies import graphs


@settings(max_examples=10)
@given(graphs(max_ops=10))
def test_never_slower_than_dtr(graph: Graph) -> None:
    workload = workload_of(graph)
    plain = measure(workload, workload.plain).peak
    for share in (0.8, 0.6, 0.4):
        at = replace(workload, budget=max(int(plain * share), floor(workload)[0]))
        try:
            theirs = measure(at, dtr(at)).seconds
        except BudgetInfeasible:
            continue
        for policy in (auto, recompute):
            assert measure(at, policy(at, work=20_000)).seconds <= theirs * (1 + 1e-9)
