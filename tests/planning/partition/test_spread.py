"""Dividing a graph computes the same, whatever is divided; the planner's estimates are never too low."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.zoo import ZOO
from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph, check_graph
from memplan.core.in_place import placed
from memplan.core.legal_orders import require_legal
from memplan.core.lifetimes import device_problem, problem
from memplan.core.schedule import make_schedule
from memplan.errors import BudgetInfeasible
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import Link, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.evict.workload import Workload
from memplan.planning.blocks import assign, units_of
from memplan.planning.divide import devices_of, divide
from memplan.trace import trace
from tests.evict.judge import workload_of
from tests.graph_strategies import graphs
from tests.runtime.budgets import FAST_LINK

NAMES = ("cpu:0", "cpu:1", "cpu:2")
LINK = Link(bytes_per_second=1e9, latency=1e-6)


def _applied(graph: Graph) -> tuple[Workload, Applied]:
    workload = replace(workload_of(graph, host_resident=True), device=NAMES[0])
    workload = workload.within(measure(workload, workload.plain).peak)
    return workload, apply(workload, flow(workload))


@given(st.data())
def test_any_division_computes_the_same(data: st.DataObject) -> None:
    graph = data.draw(graphs(max_ops=12))
    workload, whole = _applied(graph)
    wanted = [data.draw(st.integers(0, 2)) for _ in whole.graph.ops]
    devices = devices_of(whole.graph, wanted)
    found = divide(whole.graph, whole.sources, devices, NAMES)
    ids = tuple(range(len(found.graph.ops)))
    check_graph(found.graph)
    require_legal(found.graph, ids)
    require_equivalent(workload.graph, found.graph, found.sources)
    require_equivalent(workload.graph, placed(found.graph, ids), found.sources)
    for op in found.graph.ops:
        on = {found.graph.storages[s].device for s in found.graph.touched(op) if found.graph.storages[s].planned}
        assert len(on) <= 1 or op.target.startswith("memplan.send")
    seconds, stall = simulate(found.graph, FAST_LINK)
    assert 0 <= stall <= seconds


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_estimates_are_never_too_low_and_budgets_are_kept(name: str) -> None:
    graph = trace(*ZOO[name]("nano"), device="cpu").graph
    _, whole = _applied(graph)
    units = units_of(whole.graph, 2)
    assert len(units.names) >= 2
    assert name != "gpt2" or units.names == ("", "model.transformer.h.0", "model.transformer.h.1", "")
    assert {u for u, op in zip(units.of, whole.graph.ops, strict=True) if op.target not in TRANSFERS} == {
        *range(len(units.names))
    }
    assert {u for u, op in zip(units.of, whole.graph.ops, strict=True) if op.target in TRANSFERS} == {-1}
    even = assign(whole.graph, units, LINK, alignment=1, count=2, budgets=None)
    wanted = [even.device_of(unit) if unit >= 0 else -1 for unit in units.of]
    found = divide(whole.graph, whole.sources, devices_of(whole.graph, wanted), NAMES)
    schedule = make_schedule(found.graph, tuple(range(len(found.graph.ops))), "traced")
    everything = problem(found.graph, schedule, alignment=1)
    for device, estimate in zip(NAMES, even.nbytes, strict=False):
        assert device_problem(everything, found.graph, device).max_live <= estimate
    with pytest.raises(BudgetInfeasible) as caught:
        assign(whole.graph, units, LINK, alignment=1, count=2, budgets=[1, 1])
    kept = assign(whole.graph, units, LINK, alignment=1, count=2, budgets=[caught.value.smallest] * 2)
    assert max(kept.nbytes) <= caught.value.smallest
    all_on_one = assign(whole.graph, units, LINK, alignment=1, count=2, budgets=[1 << 40, 1])
    assert all_on_one.ends == (len(units.names), len(units.names))
    assert all_on_one.seconds == 0.0
