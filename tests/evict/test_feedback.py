"""What a measured step changes in the next plan: links fitted to copies, reloads that start earlier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.evictions import RNG_STATE_BYTES
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link
from memplan.evict.feedback import ProfileGuidedPolicy, RecordingPolicy, link_of, with_lateness
from memplan.evict.measure import measure, overlapped
from memplan.evict.policies.flow import genoa
from memplan.evict.rng_states import decide, with_saved_states
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


def test_leads_add_up() -> None:
    assert with_lateness({(1, 0): 1.0, (2, 0): 2.0}, {(2, 0): 0.5, (3, 1): 4.0}) == {
        (1, 0): 1.0,
        (2, 0): 2.5,
        (3, 1): 4.0,
    }


def _chain(ops: int) -> Graph:
    b = GraphBuilder()
    made = [b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(ops)]
    for before, after in zip((None, *made), made, strict=False):
        b.op(Phase.FORWARD, () if before is None else (before,), (after,))
    return b.graph((made[-1],))


def test_a_policy_is_remembered_by_the_answer_that_a_plan_was_made_of() -> None:
    policy = RecordingPolicy(lambda workload: workload.plain, "mine")
    answers = [policy.events]
    assert policy.__name__ == "mine"
    workloads = [workload_of(_chain(ops), budget=1 << 20) for ops in (3, 4, 5)]
    made = [policy(workload) for workload in workloads]  # of variants, of which the second is taken
    ops = workloads[1].graph.ops
    policy.settle((0, -1, 1, 2, 3), (ops[0], *ops))  # a copy is no op of the step
    answers.append(policy.events)
    policy(workloads[2])
    policy.settle((0, 1, 2), workloads[0].graph.ops)  # nothing was asked for this one since
    answers.append(policy.events)
    policy(workloads[0])
    policy.settle((0, 1, 2), [replace(op, target="other") for op in workloads[0].graph.ops])  # as many other ops
    answers.append(policy.events)
    assert answers == [None, made[1], None, None]


def test_events_of_a_workload_with_other_ops_are_not_compared() -> None:
    b = GraphBuilder()
    mask = b.storage(StorageKind.ACTIVATION, 2 * RNG_STATE_BYTES, planned=True)
    out = b.storage(StorageKind.OUTPUT, 8, planned=False)
    b.op(Phase.FORWARD, (), (mask,), random=True)
    b.op(Phase.FORWARD, (mask,), (out,))
    states = with_saved_states(workload_of(b.graph((out,)), budget=1 << 20))
    policy = ProfileGuidedPolicy(states.plain.plain, {})
    with pytest.raises(BudgetInfeasible, match="another workload"):
        policy(states.workload)
    assert decide(states, policy) == (states.plain, states.plain.plain)
