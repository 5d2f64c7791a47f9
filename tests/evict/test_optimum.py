"""Recomputes against trying everything, on tiny graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.measure import WorkloadArrays, measure, to_arrays
from memplan.evict.policies.auto import recompute
from memplan.evict.workload import Event, Events, Kind, Workload, floor
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import graphs


def _everything(workload: Workload) -> Iterator[Events]:
    """Every choice of what runs again before each op, in order; what is made again is dropped first."""
    made: dict[tuple[int, ...], list[int]] = {}
    for s, ops in enumerate(workload.writers):
        if workload.redo_until[s] >= 0:
            made.setdefault(ops, []).append(s)
    rows = []
    for t in range(len(workload.graph.ops)):
        able = [u for u, made_by in made.items() if u[-1] < t <= min(workload.redo_until[s] for s in made_by)]
        rows.append([chosen for k in range(len(able) + 1) for chosen in combinations(able, k)])
    for chosen in product(*rows):
        events: list[Event] = []
        for t, groups in enumerate(chosen):
            for i in sorted(i for group in groups for i in group):
                events += [Event(Kind.DROP, s) for s in workload.writes[i] if workload.writers[s][0] == i]
                events.append(Event(Kind.RUN, i))
            events.append(Event(Kind.RUN, t))
        yield tuple(events)


@given(graphs(max_ops=5), st.floats(0, 1))
def test_recompute_never_claims_more_than_trying_everything_finds(graph: Graph, share: float) -> None:
    workload = workload_of(graph)
    plain, least = measure(workload, workload.plain).peak, floor(workload)[0]
    workload = replace(workload, budget=round(least + share * (plain - least)))
    arrays = WorkloadArrays(workload)
    figures = [arrays.measure(*to_arrays(events)) for events in _everything(workload)]
    fitting = [one.seconds for one in figures if one is not None and one.peak <= workload.budget]
    try:
        events = recompute(workload)
    except BudgetInfeasible:
        assert workload.budget < plain
        return
    measured = judged(graph, workload, events)[1]
    assert measured.peak <= workload.budget
    assert measured.seconds >= min(fitting) * (1 - 1e-9)
