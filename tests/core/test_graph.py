"""Graphs: their figures, what cannot be one, and reads before any write, which are refused wherever a plan is made."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph, Origin, Phase, StorageKind, Value, check_graph, require_same
from memplan.core.legal_orders import predecessors, require_legal, require_written_first
from memplan.errors import InvalidPlan, PlanMismatch
from memplan.planning import planfile
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import DEFAULTS
from memplan.schedule import traced
from memplan.solvers import solve
from tests.graph_strategies import GraphBuilder, graphs, schedules
from tests.samples import sample_graph


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3))
def test_dense_values_have_an_element_at_each_place_up_to_their_last(dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(n for n, _ in dims), tuple(stride for _, stride in dims)
    value = Value(name="v", storage=0, dtype="float32", shape=shape, strides=strides, offset=0)
    places = [sum(map(mul, at, strides)) for at in product(*map(range, shape))]
    assert value.dense == (sorted(places) == list(range(len(places))))


def test_the_figures_of_a_graph() -> None:
    graph = sample_graph()
    assert graph.touched(graph.ops[0]) == (0, 1, 2)
    assert graph.written(graph.ops[0]) == (2,)
    assert [graph.functional_bytes(op) for op in graph.ops] == [0, 60, 0, 0, 0]
    assert graph.bytes_of(StorageKind.INPUT, StorageKind.PARAMETER) == 140
    assert graph.bytes_of(StorageKind.ACTIVATION, planned=True) == 260
    assert graph.bytes_of(StorageKind.ACTIVATION) == 0


@given(graphs())
def test_random_graphs_are_graphs(graph: Graph) -> None:
    check_graph(graph)
    assert graph.forward_ops == sum(op.phase is Phase.FORWARD for op in graph.ops)
    require_same(graph, dataclasses.replace(graph))


@given(graphs())
def test_names_of_files_do_not_change_the_fingerprint(graph: Graph) -> None:
    moved = tuple(dataclasses.replace(op, origin=Origin(source="elsewhere.py:1")) for op in graph.ops)
    assert dataclasses.replace(graph, ops=moved).fingerprint == graph.fingerprint


def test_the_first_difference_is_named() -> None:
    graph = sample_graph()
    ops = list(graph.ops)
    ops[2] = dataclasses.replace(ops[2], target="aten.mean")
    with pytest.raises(PlanMismatch, match=r"aten\.sum(.|\n)*aten\.mean"):
        require_same(graph, dataclasses.replace(graph, ops=tuple(ops)))
    with pytest.raises(PlanMismatch, match="gradients"):
        require_same(graph, dataclasses.replace(graph, gradients=()))


def _broken(part: str, **changes: Any) -> Graph:
    """The sample graph with something wrong in itself, or in the first of its storages, values or ops."""
    graph = sample_graph()
    if not part:
        return dataclasses.replace(graph, **changes)
    first, *rest = getattr(graph, part)
    parts: dict[str, Any] = {part: (dataclasses.replace(first, **changes), *rest)}
    return dataclasses.replace(graph, **parts)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("values", {"storage": 99}),
        ("values", {"storage": -1}),
        ("values", {"shape": (1, 2)}),
        ("values", {"shape": (-1,)}),
        ("values", {"strides": (-1,)}),
        ("values", {"offset": -1}),
        ("ops", {"reads": (99,)}),
        ("ops", {"writes": (-1,)}),
        ("ops", {"phase": Phase.BACKWARD}),
        ("storages", {"nbytes": -1}),
        ("storages", {"name": "parameter_1"}),
        ("", {"outputs": (99,)}),
        ("", {"gradients": (-1,)}),
    ],
)
def test_what_cannot_be_is_refused(part: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlan, match="graph"):
        check_graph(_broken(part, **changes))


@given(graphs())
def test_the_networkx_graph_has_every_dependency_and_no_other(graph: Graph) -> None:
    made = graph.to_networkx()
    assert [made.nodes[i]["name"] for i in range(len(graph.ops))] == [op.name for op in graph.ops]
    assert [frozenset(made.predecessors(i)) for i in range(len(graph.ops))] == list(predecessors(graph))
    require_legal(graph, tuple(nx.lexicographical_topological_sort(made, key=lambda i: (i >= graph.forward_ops, -i))))


def test_the_networkx_graph_says_why_an_op_waits() -> None:
    b = GraphBuilder()
    x, y = (b.storage(StorageKind.ACTIVATION, nbytes, planned=True) for nbytes in (100, 20))
    b.op(Phase.FORWARD, (), (x,), random=True, target="aten.rand")
    b.op(Phase.FORWARD, (x,), (y,))
    b.op(Phase.BACKWARD, (y,), (), random=True)
    made = b.graph().to_networkx()
    assert made.edges[0, 1]["storages"] == ("activation_0",)
    assert made.edges[0, 2]["storages"] == ()  # random ops keep their order
    about = {"name": "op0", "target": "aten.rand", "phase": "forward", "module": "", "source": "", "nbytes": 100}
    assert made.nodes[0] == about


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


@given(graphs(), st.data())
def test_what_leaves_the_arena_in_parts_leaves_it_as_at_once(graph: Graph, data: st.DataObject) -> None:
    planned = [i for i, s in enumerate(graph.storages) if s.planned]
    one, two = (data.draw(st.frozensets(st.sampled_from(planned))) if planned else frozenset() for _ in range(2))
    assert graph.with_outside(one).with_outside(two) == graph.with_outside(one | two)
