"""What measured steps change in the next plan, and what an op costs that draws random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Origin, Phase, StorageKind
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import DEVICES, Link
from memplan.evict.feedback import ProfileGuidedPolicy, link_of
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies.genoa import genoa
from memplan.evict.workload import Events, Kind
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder, graphs
from tests.runtime.budgets import FAST_LINK

_SLOW = Link(bytes_per_second=1e3, latency=0.1)


@given(
    latency=st.floats(1e-7, 1e-3),
    rate=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(64, 1 << 30), min_size=2, max_size=6, unique=True),
)
def test_a_link_is_found_from_what_its_copies_took(latency: float, rate: float, sizes: list[int]) -> None:
    truth = Link(bytes_per_second=rate, latency=latency)
    found = link_of([(n, truth.seconds(n)) for n in sizes])
    assert found is not None
    for n in sizes:
        assert found.seconds(n) == pytest.approx(truth.seconds(n), rel=1e-3, abs=2e-9)


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e3)), max_size=8))
def test_whatever_copies_took_there_is_a_link(samples: list[tuple[int, float]]) -> None:
    found = link_of(samples)
    assert (found is None) is (not any(nbytes for nbytes, _ in samples))


def _starts(events: Events) -> dict[tuple[int, int], int]:
    """(storage, how many times it came back before) -> how many ops ran before its reload."""
    found: dict[tuple[int, int], int] = {}
    count: dict[int, int] = {}
    ran = 0
    for kind, of in events:
        ran += kind is Kind.RUN
        if kind is Kind.RELOAD:
            found[of, count.get(of, 0)] = ran
            count[of] = count.get(of, 0) + 1
    return found


@given(graph=graphs(), extra=st.floats(0, 1), lead=st.floats(0, 10))
def test_reloads_come_earlier_within_the_budget_and_never_later(graph: Graph, extra: float, lead: float) -> None:
    workload = workload_of(graph, costs=replace(FAST_LINK, to_host=_SLOW, to_device=_SLOW))
    plain = measure(workload, workload.plain).peak
    workload = workload.within(plain)
    try:
        events = genoa(workload)
    except BudgetInfeasible:
        return
    tight = measure(workload, events).peak
    workload = workload.within(int(tight + extra * max(plain - tight, 0)))
    before = _starts(events)
    after = overlapped(workload, events, dict.fromkeys(list(before)[::2], lead))
    _, figures = judged(graph, workload, after)  # the same values, by the oracle
    assert figures.seconds <= measure(workload, events).seconds + 1e-9
    assert all(start <= before[key] for key, start in _starts(after).items())
    assert [e for e in after if e.kind is Kind.RUN] == [e for e in events if e.kind is Kind.RUN]
    if figures.peak > workload.budget:
        with pytest.raises(BudgetInfeasible):
            ProfileGuidedPolicy(events, dict.fromkeys(list(before)[::2], lead))(workload)


NBYTES = 4096  # of a mask, and its elements


def _graph(*, random: bool, seeds: bool) -> Graph:
    """One op that reads 64 bytes and writes a mask; `seeds`: it reads those of Inductor."""
    b = GraphBuilder()
    read = b.storage(StorageKind.ACTIVATION, 64, planned=True)
    mask = b.storage(StorageKind.ACTIVATION, NBYTES, planned=True)
    b.op(Phase.FORWARD, (read,), (mask,), random=random)
    graph = b.graph((mask,))
    if not seeds:
        return graph
    storages = (replace(graph.storages[0], origin=Origin(op="inductor_seeds")), *graph.storages[1:])
    return replace(graph, storages=storages)


@pytest.mark.parametrize(("random", "seeds", "draws"), [(True, False, 1), (False, True, 1), (False, False, 0)])
def test_a_random_number_takes_time_on_the_cpu(random: bool, seeds: bool, draws: int) -> None:
    graph, plain = _graph(random=random, seeds=seeds), _graph(random=False, seeds=False)
    cpu, h100 = DEVICES["cpu"], DEVICES["h100"]
    elements = graph.values[graph.ops[0].writes[0]].shape[0]
    more = cpu.op_seconds(graph, graph.ops[0]) - cpu.op_seconds(plain, plain.ops[0])
    assert more == pytest.approx(draws * cpu.draw * elements)
    assert h100.op_seconds(graph, graph.ops[0]) == h100.op_seconds(plain, plain.ops[0])
