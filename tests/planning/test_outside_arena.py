"""Storages that leave the arena because the peak beside it comes at another time: totals by an independent count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.planning.outside_arena import plan_partly_outside
from memplan.planning.planfile import check_consistency, load, save
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, graphs

SIZE = 4096


def _plan(graph: Graph, temporaries: tuple[int, ...] = ()) -> Plan:
    scheduled = ScheduledGraph(model="m", graph=graph, schedule=traced(graph), alignment=64, versions={})
    return replace(make_plan(scheduled), temporaries=temporaries or (0,) * len(graph.ops))


def _smaller(plan: Plan, limit: int, *, gradients: bool = False, saved: bool = True) -> Plan | None:
    options = PlanOptions(gradients="arena" if gradients else "outside")
    return plan_partly_outside(plan, limit, options, saved=saved)


def _two_peaks(*, direct: bool = True, in_place: bool = False) -> Plan:
    """The arena is fullest at the second op; the fourth needs as much beside it, while one small storage is alive."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    one, two, three, small = (b.storage(StorageKind.ACTIVATION, n, planned=True) for n in (SIZE, SIZE, SIZE, 64))
    out = b.storage(StorageKind.OUTPUT, 64, planned=False)
    b.op(Phase.FORWARD, (x,), (one,), direct=direct)
    b.op(Phase.FORWARD, (one,), (two,))
    b.op(Phase.FORWARD, (two,), (three,))
    b.op(Phase.FORWARD, (three,), (small,))
    b.op(Phase.FORWARD, (small,), (out,))
    graph = b.graph(outputs=(out,))
    if in_place:
        shared = replace(graph.ops[1], inplace_candidates=((two, one),))
        graph = replace(graph, ops=(graph.ops[0], shared, *graph.ops[2:]))
    return _plan(graph, (0 if direct else SIZE, 0, 0, 0, 2 * SIZE))


def _alive(plan: Plan) -> int:
    """The total, counted step by step: the whole arena, and whatever else exists while an op runs."""
    g, order = plan.graph, plan.schedule.order
    kept = {g.values[v].storage for v in (*g.outputs, *g.gradients)}
    steps: dict[int, list[int]] = {}
    for step, op in enumerate(order):
        for value in (*plan.placed.ops[op].reads, *plan.placed.ops[op].writes):
            steps.setdefault(plan.placed.values[value].storage, []).append(step)
    made = (StorageKind.ACTIVATION, StorageKind.GRADIENT, StorageKind.OUTPUT)
    most = 0
    for step, op in enumerate(order):
        here = plan.transient[op]
        for storage, used in steps.items():
            s = g.storages[storage]
            if not s.planned and s.kind in made and used[0] <= step and (step <= used[-1] or storage in kept):
                here += s.nbytes
        most = max(most, here)
    before = sum(s.nbytes for s in g.storages if not s.planned and s.kind not in made)
    return plan.arena_size + before + most


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_dead_at_the_peak_beside_the_arena_leaves_it(direct: bool, in_place: bool) -> None:
    plan = _two_peaks(direct=direct, in_place=in_place)
    assert plan.total == SIZE + 2 * SIZE + 2 * SIZE + 64  # input, arena, temporaries, output
    limit = SIZE + 64 + 2 * SIZE + 64  # what is alive at the last op
    found = _smaller(plan, limit)
    assert found is not None
    assert found.total == _alive(found) <= limit
    assert found.arena_size == 64
    check_consistency(replace(found, temporaries=None))


def test_nothing_leaves_where_nothing_is_gained() -> None:
    assert _smaller(_two_peaks(), _two_peaks().total) is None
    b = GraphBuilder()
    only = b.storage(StorageKind.ACTIVATION, SIZE, planned=True)
    b.op(Phase.FORWARD, (), (only,))
    assert _smaller(_plan(b.graph(), (SIZE,)), 100) is None


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_leave_only_where_they_may(gradients: bool) -> None:
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    saved = b.storage(StorageKind.ACTIVATION, SIZE, planned=True)
    gradient = b.storage(StorageKind.GRADIENT, SIZE, planned=True)
    b.op(Phase.FORWARD, (x,), (saved,))
    b.op(Phase.BACKWARD, (saved,), (gradient,))
    plan = _plan(b.graph(gradients=(gradient,)), (SIZE, 0))
    found = _smaller(plan, 64 + 2 * SIZE, gradients=gradients)
    if gradients:
        assert found is not None
        assert found.total == _alive(found) == 64 + 2 * SIZE
        assert found.outside["gradients"] == SIZE
        assert "intermediate" not in found.outside
    else:
        assert found is None, "the activation is alive when the most is needed beside the arena"


@pytest.mark.parametrize("saved", [True, False])
def test_activations_that_the_backward_needs_leave_only_where_they_may(saved: bool) -> None:
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, 64, planned=False)
    large, small = (b.storage(StorageKind.ACTIVATION, n, planned=True) for n in (SIZE, 64))
    gradient = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.FORWARD, (x,), (small,))
    b.op(Phase.FORWARD, (x,), (large,))
    b.op(Phase.BACKWARD, (large, small), (small,))
    b.op(Phase.BACKWARD, (small,), (gradient,))
    plan = _plan(b.graph(gradients=(gradient,)), (0, 0, 0, SIZE))
    found = _smaller(plan, 100, saved=saved)
    if saved:
        assert found is not None
        assert found.total == _alive(found) == 64 + 64 + 64 + SIZE
        assert found.outside["intermediate"] == SIZE
    else:
        assert found is None


def test_a_plan_that_is_partly_outside_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = _two_peaks()
    found = _smaller(plan, plan.total - 2 * SIZE)
    assert found is not None
    save(found, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == found


@given(graphs(), st.data())
def test_totals_are_counted_and_never_grow(graph: Graph, data: Any) -> None:
    most = st.integers(0, 600)
    beside = tuple(data.draw(most) for _ in graph.ops)
    plan = _plan(graph, tuple(map(sum, zip(beside, map(graph.functional_bytes, graph.ops), strict=True))))
    assert plan.total == _alive(plan)
    found = _smaller(plan, data.draw(st.integers(0, plan.total)), gradients=data.draw(st.booleans()))
    if found is not None:
        check_consistency(found)
        assert found.total == _alive(found) < plan.total
        assert found.schedule.order == plan.schedule.order
