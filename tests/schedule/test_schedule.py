from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.legal_orders import require_legal
from memplan.core.schedule import Schedule, live_bytes, make_schedule, working_set_bound
from memplan.errors import InvalidPlan
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder, graphs, schedules
from tests.samples import sample_graph


def recounted(graph: Graph, order: tuple[int, ...]) -> list[int]:
    """Live bytes of planned storages at each step, straight from the definition."""
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    touches: dict[int, list[int]] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        for value in (*op.reads, *op.writes):
            touches.setdefault(graph.values[value].storage, []).append(step)
    profile = []
    for step in range(len(order)):
        alive = [
            s
            for s, steps in touches.items()
            if graph.storages[s].planned and min(steps) <= step and (s in kept or step <= max(steps))
        ]
        dying = {
            graph.values[read].storage
            for _, read in graph.ops[order[step]].inplace_candidates
            if max(touches[graph.values[read].storage]) == step
        }
        in_place = max((graph.storages[s].nbytes for s in dying), default=0)
        profile.append(sum(graph.storages[s].nbytes for s in alive) - in_place)
    return profile


@given(st.data())
def test_live_bytes_are_what_a_recount_finds(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    schedule = data.draw(schedules(graph))
    assert list(live_bytes(graph, schedule.order)) == recounted(graph, schedule.order)
    assert schedule.max_live == max(recounted(graph, schedule.order), default=0)


@given(graphs())
def test_the_bound_is_below_every_order(graph: Graph) -> None:
    schedule = traced(graph)
    assert schedule.order == tuple(range(len(graph.ops)))
    assert working_set_bound(graph) == schedule.bound <= schedule.max_live
    assert schedule.certified == (schedule.gap == 0.0)


@given(graphs(max_ops=5))
def test_a_legal_order_keeps_every_hazard(graph: Graph) -> None:
    """By brute force over all orders: legal exactly when no two ops that conflict change places."""
    conflicts = [
        (i, j)
        for i, j in itertools.combinations(range(len(graph.ops)), 2)
        if (graph.ops[i].random and graph.ops[j].random)
        or set(graph.written(graph.ops[i])) & set(graph.touched(graph.ops[j]))
        or set(graph.touched(graph.ops[i])) & set(graph.written(graph.ops[j]))
        or (graph.ops[i].phase is Phase.FORWARD and graph.ops[j].phase is Phase.BACKWARD)
    ]
    for order in itertools.permutations(range(len(graph.ops))):
        kept = all(order.index(i) < order.index(j) for i, j in conflicts)
        try:
            require_legal(graph, order)
        except InvalidPlan:
            assert not kept
        else:
            assert kept


@pytest.mark.parametrize("order", [(), (0, 1, 2, 3), (0, 1, 2, 3, 3), (0, 1, 2, 3, 5), (1, 0, 2, 3, 4)])
def test_what_is_no_order_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPlan, match=r"schedule\.order"):
        require_legal(sample_graph(), order)


def test_a_swap_is_named() -> None:
    with pytest.raises(InvalidPlan, match=r"schedule\.order\[0\]: runs 'op1' before 'op0', which it needs"):
        require_legal(sample_graph(), (1, 0, 2, 3, 4))


@pytest.mark.parametrize("target", ["aten.bernoulli_.float", "_c10d_functional.all_reduce.default"])
def test_random_ops_and_collectives_keep_their_order(target: str) -> None:
    b = GraphBuilder()
    for _ in range(2):
        made = b.storage(StorageKind.ACTIVATION, 8, planned=True)
        b.op(Phase.FORWARD, (), (made,), random=target.startswith("aten."), target=target)
    graph = b.graph()
    require_legal(graph, (0, 1))
    with pytest.raises(InvalidPlan):
        require_legal(graph, (1, 0))


def test_forward_stays_before_backward() -> None:
    b = GraphBuilder()
    for phase in Phase:
        b.op(phase, (), (b.storage(StorageKind.ACTIVATION, 8, planned=True),))
    with pytest.raises(InvalidPlan, match="of the forward in the backward"):
        require_legal(b.graph(), (1, 0))


def test_an_empty_schedule_has_no_gap() -> None:
    schedule = make_schedule(GraphBuilder().graph(), (), "none")
    assert schedule == Schedule(policy="none", order=(), max_live=0, bound=0)
    assert schedule.gap == 0.0


_CHECKED = (0, 1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("order", "late", "early"),
    [
        ((0, 2, 1, 3, 4, 5, 6, 7, 8), "op2", "op1"),  # uses what is checked
        ((0, 3, 1, 2, 4, 5, 6, 7, 8), "op3", "op1"),  # changes a parameter
        ((0, 4, 1, 2, 3, 5, 6, 7, 8), "op4", "op1"),  # draws
        ((0, 1, 2, 3, 4, 6, 7, 5, 8), "op7", "op5"),  # another check
    ],
)
def test_what_waits_for_an_op_that_only_raises(order: tuple[int, ...], late: str, early: str) -> None:
    b = GraphBuilder()
    weight = b.storage(StorageKind.PARAMETER, 8, planned=False)
    made, info, used, noise, other, second = (b.storage(StorageKind.ACTIVATION, 8, planned=True) for _ in range(6))
    loss = b.storage(StorageKind.OUTPUT, 8, planned=False)
    given = b.storage(StorageKind.INPUT, 8, planned=False)
    b.op(Phase.FORWARD, (given,), (made, info))
    b.op(Phase.FORWARD, (info,), (), target="aten._linalg_check_errors.default")
    b.op(Phase.FORWARD, (made,), (used,))
    b.op(Phase.FORWARD, (given,), (weight,))
    b.op(Phase.FORWARD, (), (noise,), random=True)
    b.op(Phase.FORWARD, (info,), (), target="aten._linalg_check_errors.default")
    b.op(Phase.FORWARD, (given,), (other, second))
    b.op(Phase.FORWARD, (second,), (), target="aten._linalg_check_errors.default")
    b.op(Phase.FORWARD, (given,), (loss,))
    graph = b.graph(outputs=(loss,))
    require_legal(graph, _CHECKED)
    require_legal(graph, (8, 6, 0, 1, 2, 3, 4, 5, 7))  # what has nothing to do with it does not wait
    with pytest.raises(InvalidPlan, match=f"runs '{late}' before '{early}'"):
        require_legal(graph, order)
