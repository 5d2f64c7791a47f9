"""Tests of the caller's part of a step: what it keeps, drops and allocates around forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.core.graph import Graph, Phase, StorageKind, check_graph
from memplan.core.plan import Plan
from memplan.core.schedule import live_bytes, storage_intervals
from memplan.planning.caller_side import (
    CALLER,
    CallerSide,
    graph_with_caller,
    plan_with_caller,
    transient_with_caller,
)
from memplan.planning.eager_total import eager_total
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import AsEager
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.planning.outside_arena import need_with_update
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder

SIZE, WIDE = 1024, 4096  # bytes of an activation, and of the result
SAVED = "activation_1"
RESULT = "output_2"


def _graph(*, gradient: int = SIZE, planned: bool = False) -> Graph:
    """A forward with one activation that is saved and a wide result, and a backward from the result's gradient."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    saved = b.storage(StorageKind.ACTIVATION, SIZE, planned=True)
    result = b.storage(StorageKind.OUTPUT, WIDE, planned=False)
    tangent = b.storage(StorageKind.TANGENT, WIDE, planned=False)
    inner = b.storage(StorageKind.ACTIVATION, 3 * SIZE, planned=True)
    found = b.storage(StorageKind.GRADIENT, gradient, planned=planned)
    b.op(Phase.FORWARD, (x,), (saved,))
    b.op(Phase.FORWARD, (saved,), (result,))
    b.op(Phase.BACKWARD, (tangent, saved), (inner,))
    b.op(Phase.BACKWARD, (inner, x), (found,))
    return b.graph(outputs=(result,), gradients=(found,))


def _plan(graph: Graph, transient: tuple[int, ...] = (0, 0, 0, 0)) -> Plan:
    scheduled = ScheduledGraph(model="m", graph=graph, schedule=traced(graph), alignment=64, versions={})
    return replace(make_plan(scheduled), temporaries=transient)


def test_the_caller_is_three_ops_of_a_valid_graph() -> None:
    made = graph_with_caller(_graph(), CallerSide())
    check_graph(made)
    assert [op.target == CALLER for op in made.ops] == [True, False, False, True, True, False, False]
    assert made.forward_ops == 4
    assert made.bytes_of(StorageKind.TANGENT) == 0


@pytest.mark.parametrize("dropped", [True, False])
def test_results_are_alive_as_the_caller_has_them(dropped: bool) -> None:
    graph = graph_with_caller(_graph(), CallerSide(dropped=frozenset({RESULT} if dropped else ())))
    live = storage_intervals(graph, tuple(range(len(graph.ops))))
    of = {graph.storages[i].name: (interval.start, interval.end) for i, interval in live.items()}
    assert of[RESULT] == (2, 4 if dropped else 7)
    assert of.get(f"{RESULT} of the step before") == (None if dropped else (0, 4))
    assert of["tangent_3"] == (4, 6)  # from the loss to the op that reads it last


def test_gradients_of_the_step_before_are_alive_in_the_forward() -> None:
    graph = graph_with_caller(_graph(), CallerSide(held=3 * WIDE, dropped=frozenset({RESULT})))
    check_graph(graph)
    live = storage_intervals(graph, tuple(range(len(graph.ops))))
    (held,) = (i for i, storage in enumerate(graph.storages) if storage.nbytes == 3 * WIDE)
    assert (live[held].start, live[held].end) == (0, 4)
    plan = _plan(_graph())
    needs = [need_with_update(plan_with_caller(plan, CallerSide(held=held)), 0) for held in (0, SIZE, 9 * WIDE)]
    assert needs == [SIZE + plan.arena_size + 2 * WIDE, needs[0] + SIZE, SIZE + plan.arena_size + 11 * WIDE]


def test_a_plan_with_the_caller_keeps_its_offsets_and_what_is_alive() -> None:
    plan = _plan(_graph(), (1, 2, 3, 4))
    around = plan_with_caller(plan, CallerSide(loss=500))
    assert around.solution == plan.solution
    assert around.temporaries == (0, 1, 2, 0, 500, 3, 4)
    assert around.schedule.order == tuple(range(7))
    inside = [0] * 7
    for buffer in around.problem.buffers:
        for step in range(buffer.live.start, buffer.live.end):
            inside[step] += buffer.size
    assert inside == list(live_bytes(around.graph, around.schedule.order))


def test_the_caller_adds_what_it_allocates_where_it_allocates_it() -> None:
    plan = _plan(_graph())
    kept, dropped = CallerSide(), CallerSide(dropped=frozenset({RESULT}))
    needs = [
        need_with_update(plan_with_caller(plan, replace(side, loss=loss)), 0)
        for side in (kept, dropped)
        for loss in (0, WIDE)
    ]
    fixed = SIZE + plan.arena_size  # the input
    assert needs == [fixed + 2 * WIDE, fixed + 3 * WIDE, fixed + WIDE, fixed + 2 * WIDE]


def test_a_forward_alone_has_no_caller() -> None:
    b = GraphBuilder()
    x, y = b.storage(StorageKind.INPUT, SIZE, planned=False), b.storage(StorageKind.OUTPUT, SIZE, planned=False)
    b.op(Phase.FORWARD, (x,), (y,))
    graph = b.graph(outputs=(y,), gradients=())
    assert graph_with_caller(graph, CallerSide(loss=7)) is graph
    assert transient_with_caller(graph, (3,), CallerSide(loss=7)) == (3,)
    plan = _plan(graph, (3,))
    assert plan_with_caller(plan, CallerSide(loss=7)) is plan


def _never(*_: object) -> Plan:
    raise AssertionError("nothing is evicted for a caller")


def test_results_leave_the_arena_for_a_loss_outside() -> None:
    """Results of the backward alone leave the arena, as the loss has its bytes while the arena is idle."""
    graph, side = _graph(), CallerSide(loss=WIDE, dropped=frozenset({RESULT}))
    options = replace(DEFAULTS, gradients="safe")
    step = AsEager(graph=graph, transient=(0, 0, 0, 0), options=options, replan=_never, saved=True, copies=False)
    plan = _plan(graph)
    found = step.beside_caller(plan, side, 0, _never)
    assert found is not None
    around = graph_with_caller(graph, side)
    eager = eager_total(around, transient_with_caller(graph, (0, 0, 0, 0), side))
    before, after = (need_with_update(plan_with_caller(one, side), 0) for one in (plan, found))
    assert before == eager + 3 * SIZE
    assert after <= eager
    assert [s.name for s in found.graph.storages if s.planned] == [SAVED]
    assert step.beside_caller(found, side, 0, _never) is None


def test_eagers_order_is_taken_where_another_one_keeps_a_gradient_of_a_result() -> None:
    """An order that makes a wide gradient last keeps the gradient of the result all the while."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    saved = [b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(3)]
    result = b.storage(StorageKind.OUTPUT, SIZE, planned=False)
    tangent = b.storage(StorageKind.TANGENT, WIDE, planned=False)
    found = [b.storage(StorageKind.GRADIENT, WIDE, planned=False) for _ in range(2)]
    for before, after in zip((x, *saved), (*saved, result), strict=True):
        b.op(Phase.FORWARD, (before,), (after,))
    b.op(Phase.BACKWARD, (tangent, *saved), (found[0],))
    b.op(Phase.BACKWARD, (x,), (found[1],))
    graph = b.graph(outputs=(result,), gradients=tuple(found))
    late = replace(traced(graph), order=(0, 1, 2, 3, 5, 4))
    scheduled = ScheduledGraph(model="m", graph=graph, schedule=late, alignment=64, versions={})
    plan = replace(make_plan(scheduled), temporaries=(0,) * 6)
    step = AsEager(graph=graph, transient=(0,) * 6, options=PlanOptions(), replan=_never, saved=True, copies=False)
    found_plan = step.beside_caller(plan, CallerSide(), 0, _never)
    assert found_plan is not None
    assert found_plan.schedule.order == tuple(range(6))
