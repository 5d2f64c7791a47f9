"""Reads before any write are refused, in orders of random graphs, and in plans that are made or read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph, Phase, StorageKind, check_graph
from memplan.core.legal_orders import require_legal
from memplan.core.written_first import require_written_first
from memplan.errors import InvalidPlan
from memplan.planning import planfile
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import DEFAULTS
from memplan.schedule import traced
from memplan.solvers import solve
from tests.graph_strategies import GraphBuilder, graphs, schedules

UNWRITTEN = "before anything has written it"
HELD = (StorageKind.INPUT, StorageKind.PARAMETER)


def _storages(graph: Graph, values: tuple[int, ...]) -> set[int]:
    return {graph.values[v].storage for v in values}


def _scheduled(graph: Graph) -> ScheduledGraph:
    return ScheduledGraph(model="m", graph=graph, schedule=traced(graph), alignment=8, versions={})


@given(st.data())
def test_every_legal_order_is_accepted(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    require_written_first(graph, data.draw(schedules(graph)).order)


@given(st.data(), st.booleans())
def test_a_writer_that_comes_after_a_reader_or_never_is_refused(data: st.DataObject, dropped: bool) -> None:
    graph = data.draw(graphs())
    order = list(data.draw(schedules(graph)).order)
    reads = {
        (step, storage)
        for step, i in enumerate(order)
        for storage in _storages(graph, graph.ops[i].reads)
        if graph.storages[storage].kind not in HELD and graph.storages[storage].nbytes
    }
    assume(reads)
    step, storage = data.draw(st.sampled_from(sorted(reads)))
    early = [i for i in order[:step] if storage in graph.written(graph.ops[i])]
    assert early, "the strategy makes graphs in which all that is read was written"
    rest = [i for i in order if i not in early]
    late = rest.index(order[step]) + 1
    wrong = rest if dropped else [*rest[:late], *early, *rest[late:]]
    with pytest.raises(InvalidPlan, match=UNWRITTEN):
        require_written_first(graph, wrong)
    with pytest.raises(InvalidPlan, match=UNWRITTEN):  # in that order from the start
        make_plan(_scheduled(replace(graph, ops=tuple(graph.ops[i] for i in wrong))))


@given(st.data(), st.booleans())
def test_a_result_that_the_forward_does_not_write_is_refused(data: st.DataObject, dropped: bool) -> None:
    graph = data.draw(graphs())
    order = list(data.draw(schedules(graph)).order)
    returned = [v for v in graph.outputs if graph.storages[graph.values[v].storage].nbytes]
    backward = [i for i in order if graph.ops[i].phase is Phase.BACKWARD]
    assume(returned and (dropped or backward))
    storage = graph.values[data.draw(st.sampled_from(returned))].storage
    makers = [i for i in order if storage in graph.written(graph.ops[i])]
    moved = tuple(
        replace(op, phase=Phase.BACKWARD) if i in makers and not dropped else op for i, op in enumerate(graph.ops)
    )
    with pytest.raises(InvalidPlan, match=UNWRITTEN):
        require_written_first(
            replace(graph, ops=moved), [i for i in order if i not in makers] + ([] if dropped else makers)
        )


@pytest.mark.parametrize("kind", HELD)
def test_a_forward_that_copies_what_only_the_backward_has_is_refused(kind: StorageKind, tmp_path: Path) -> None:
    b = GraphBuilder()
    x, held = b.storage(StorageKind.INPUT, 64, planned=False), b.storage(kind, 64, planned=False)
    tangent, gradient = (b.storage(k, 64, planned=False) for k in (StorageKind.TANGENT, StorageKind.GRADIENT))
    hidden, new = (b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(2))
    b.op(Phase.FORWARD, (x,), (hidden,))
    b.op(Phase.FORWARD, (new,), (held,), target="aten.copy_.default")
    b.op(Phase.BACKWARD, (tangent,), (new,))
    b.op(Phase.BACKWARD, (tangent, hidden), (gradient,))
    faulty = b.graph(gradients=(gradient,))
    first, copied, made, last = faulty.ops
    check_graph(faulty)
    require_legal(faulty, traced(faulty).order)  # it keeps the order of the trace, whatever that is
    with pytest.raises(InvalidPlan, match=f"op1 reads {faulty.storages[new].name!r} {UNWRITTEN}"):
        make_plan(_scheduled(faulty))
    early = replace(faulty, ops=(first, replace(copied, reads=(tangent,)), made, last))
    with pytest.raises(InvalidPlan, match=f"op1 reads {faulty.storages[tangent].name!r} {UNWRITTEN}"):
        make_plan(_scheduled(early))
    right = make_plan(_scheduled(replace(faulty, ops=(first, made, replace(copied, phase=Phase.BACKWARD), last))))
    right.save(tmp_path / "plan.json")
    assert planfile.load(tmp_path / "plan.json") == right
    schedule = traced(faulty)
    problem = lifetimes.problem(faulty, schedule, alignment=8)
    solution = solve(problem, solver=DEFAULTS.layout_solver)
    replace(right, graph=faulty, schedule=schedule, problem=problem, solution=solution).save(tmp_path / "plan.json")
    with pytest.raises(InvalidPlan, match=f"op1 reads .* {UNWRITTEN}"):
        planfile.load(tmp_path / "plan.json")
