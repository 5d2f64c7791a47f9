"""Dividing a graph computes the same, whatever is divided; the planner's estimates are never too low."""

from __future__ import annotations

from bisect import bisect_right
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
from memplan.evict.apply import Applied, apply
from memplan.evict.costs import Link, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.evict.workload import Workload
from memplan.planning.divide import devices_of, divide
from memplan.planning.multi_device import assign, units_of
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
    found, sources = divide(whole.graph, whole.sources, devices, NAMES)
    ids = tuple(range(len(found.ops)))
    check_graph(found)
    require_legal(found, ids)
    require_equivalent(workload.graph, found, sources)
    require_equivalent(workload.graph, placed(found, ids), sources)
    for op in found.ops:
        on = {found.storages[s].device for s in found.touched(op) if found.storages[s].planned}
        assert len(on) <= 1 or op.target.startswith("memplan.send")
    seconds, stall = simulate(found, FAST_LINK)
    assert 0 <= stall <= seconds


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_estimates_are_never_too_low_and_budgets_are_kept(name: str) -> None:
    graph = trace(*ZOO[name]("nano"), device="cpu").graph
    _, whole = _applied(graph)
    units = units_of(whole.graph, 2)
    assert max(units) >= 2
    homes: dict[str, set[int]] = {}
    for unit, op in zip(units, whole.graph.ops, strict=True):
        assert (unit == -1) is (op.target in TRANSFERS)
        if unit >= 0 and ".h." in op.origin.module:
            homes.setdefault(op.origin.module.partition(".h.")[2][0], set()).add(unit)
    assert name != "gpt2" or [len(found) for found in homes.values()] == [1, 1], "blocks stay whole"

    def run(budgets: list[int] | None) -> tuple[int, tuple[int, ...]]:
        return assign(whole.graph, units, budgets, link=LINK, alignment=1, count=2)

    least, _ = run([0, 0])
    over, ends = run([least, least])
    assert over == 0 < run([1, 1])[0]
    wanted = [bisect_right(ends, unit) if unit >= 0 else -1 for unit in units]
    found, _ = divide(whole.graph, whole.sources, devices_of(whole.graph, wanted), NAMES)
    everything = problem(found, make_schedule(found, tuple(range(len(found.ops))), "traced"), alignment=1)
    for device in NAMES:
        assert device_problem(everything, found, device).max_live <= least, "estimates are never too low"
    assert run([1 << 40, 1]) == (0, (max(units) + 1, max(units) + 1)), "all on one device, without transfers"
