"""What a measured step changes in the next plan: links fitted to copies, reloads that start earlier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link
from memplan.evict.feedback import link_of, started_earlier, with_lateness
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies import policy_name
from memplan.evict.policies.flow import genoa
from memplan.evict.workload import Events, Kind
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import graphs
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
    assert started_earlier(genoa, dict.fromkeys(list(before)[::2], lead))(workload) == after
    assert policy_name(started_earlier(genoa, {})) == "genoa"


def test_leads_add_up() -> None:
    assert with_lateness({(1, 0): 1.0, (2, 0): 2.0}, {(2, 0): 0.5, (3, 1): 4.0}) == {
        (1, 0): 1.0,
        (2, 0): 2.5,
        (3, 1): 4.0,
    }
