"""Budgets of the total and of the host: what eager is predicted to need, limits that hold, and what errors name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memplan.core.graph import Graph, Phase, Storage, StorageKind
from memplan.core.plan import Plan
from memplan.core.totals import copied_bytes
from memplan.errors import BudgetInfeasible, InvalidPlan
from memplan.evict.costs import DEVICES, CostModel
from memplan.evict.policies.auto import auto
from memplan.planning.base_graph import eager_total
from memplan.planning.budget import plan_within
from memplan.planning.options import PlanOptions
from memplan.planning.planfile import check_consistency
from tests.graph_strategies import GraphBuilder
from tests.planning.test_budget import SIZE, chain, scheduled
from tests.runtime.budgets import FAST_LINK, QUICK


def _plan(graph: Graph | None = None, costs: CostModel = DEVICES["a100"], **options: Any) -> Plan:
    asked = PlanOptions(**options)
    return plan_within(scheduled(chain() if graph is None else graph, reserve=asked.reserved), asked, costs)


def test_eager_holds_the_inputs_and_all_that_is_alive_in_traced_order() -> None:
    """The input, six saved tensors and a gradient: when the kept gradient of 64 bytes is made, most of it is gone."""
    assert eager_total(chain(6)) == 8 * SIZE
    assert eager_total(chain(6)) + 64 == _plan(budget="1GiB").total, (
        "the arena stays while the caller's results are made"
    )


def test_eager_does_nothing_in_place() -> None:
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    one, two = (b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(2))
    out = b.storage(StorageKind.OUTPUT, 64, planned=False)
    b.op(Phase.FORWARD, (x,), (one,))
    b.op(Phase.FORWARD, (one,), (two,))
    b.op(Phase.FORWARD, (two,), (out,))
    graph = b.graph(outputs=(out,))
    shared = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], inplace_candidates=((two, one),)), graph.ops[2]))
    assert _plan(shared, budget="1GiB").arena_size == SIZE
    assert eager_total(shared) == eager_total(graph) == 3 * SIZE


@pytest.mark.parametrize(("budget", "share"), [(0.75, 0.75), ("60%", 0.6), (1.0, 1.0)])
def test_a_share_is_of_the_predicted_eager_total(budget: Any, share: float) -> None:
    plan = _plan(budget=budget)
    assert plan.eviction is not None
    assert plan.eviction.budget == int(eager_total(chain()) * share)
    assert plan.total <= plan.eviction.budget
    check_consistency(plan)


def test_the_total_is_recorded_and_checked() -> None:
    plan = _plan(budget=6 * SIZE, reserve=512)
    assert plan.eviction is not None
    assert plan.eviction.budget == 6 * SIZE
    assert plan.eviction.arena_budget == 6 * SIZE - (plan.total - plan.arena_size) == plan.arena_limit
    for wrong, where in (
        (replace(plan, eviction=replace(plan.eviction, budget=plan.total - 1)), "eviction.budget"),
        (replace(plan, reserve=SIZE), "eviction.budget"),
        (replace(plan, reserve=-1), "reserve"),
        (replace(plan, eviction=replace(plan.eviction, budget=-1)), "eviction"),
    ):
        with pytest.raises(InvalidPlan) as caught:
            check_consistency(wrong)
        assert caught.value.where == where


def test_the_error_names_what_lies_beside_the_arena_and_a_budget_that_works() -> None:
    with pytest.raises(BudgetInfeasible, match=r"reads and writes .* beside the arena are .*inputs 1.00 MiB") as caught:
        _plan(budget=2 * SIZE)
    assert caught.value.where == "budget"
    assert caught.value.op in {op.name for op in chain().ops}
    smallest = caught.value.smallest
    assert _plan(budget=smallest).total <= smallest
    assert _plan(budget="min").total == smallest
    with pytest.raises(BudgetInfeasible):
        _plan(budget=smallest - SIZE // 2)


# -- copies on the host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_host_budget_is_kept_by_computing_again(copies: int) -> None:
    free = _plan(arena_budget=4 * SIZE, policy=QUICK, costs=FAST_LINK)
    assert free.host_size > 2 * SIZE
    plan = _plan(arena_budget=4 * SIZE, host_budget=copies * SIZE, policy=auto, costs=FAST_LINK)
    assert plan.host_size <= copies * SIZE
    assert plan.arena_size <= 4 * SIZE
    assert plan.eviction is not None
    assert plan.eviction.host_budget == copies * SIZE
    check_consistency(plan)
    with pytest.raises(InvalidPlan, match="host"):
        check_consistency(replace(free, eviction=replace(free.eviction, host_budget=free.host_size - 1)))  # type: ignore[type-var]


def test_a_host_budget_that_cannot_be_kept_names_the_smallest() -> None:
    options: dict[str, Any] = {"arena_budget": 4 * SIZE, "policy": "flow", "costs": FAST_LINK}
    with pytest.raises(BudgetInfeasible, match="on the host") as caught:
        _plan(**options, host_budget="1KiB")
    assert caught.value.where == "host_budget"
    assert 0 < caught.value.smallest <= _plan(**options).host_size
    assert _plan(**options, host_budget=caught.value.smallest).host_size <= caught.value.smallest


def test_pinned_memory_is_that_of_cuda() -> None:
    graph = chain()
    on_cuda = replace(graph, storages=tuple(replace(s, device="cuda:0") for s in graph.storages))
    options: dict[str, Any] = {"arena_budget": 4 * SIZE, "policy": "flow", "costs": FAST_LINK, "pinned_budget": 1024}
    assert _plan(graph, **options).host_size > 1024
    with pytest.raises(BudgetInfeasible) as caught:
        _plan(on_cuda, **options)
    assert caught.value.where == "pinned_budget"
    smallest = caught.value.smallest
    plan = _plan(on_cuda, **{**options, "pinned_budget": smallest})
    assert plan.host_size == plan.pinned == smallest, "to the byte"
    with pytest.raises(BudgetInfeasible) as caught:
        _plan(on_cuda, **{**options, "pinned_budget": smallest - 1})
    assert caught.value.smallest == smallest
    broken = replace(plan, eviction=replace(plan.eviction, pinned_budget=smallest - 1))  # type: ignore[type-var]
    with pytest.raises(InvalidPlan, match="locked"):
        check_consistency(broken)
    assert _plan(graph, **options).pinned == 0


def test_parameters_and_results_that_are_copied_are_counted() -> None:
    sizes = {"w": 3000, "unused": 0, "exp_avg": 4097, "gradient": 3000, "loss": 4, "inside": 999, "x": 700}
    kinds: tuple[StorageKind, ...] = (
        StorageKind.PARAMETER,
        StorageKind.CONSTANT,
        StorageKind.OPTIMIZER_STATE,
        StorageKind.GRADIENT,
    )
    kinds += (StorageKind.OUTPUT, StorageKind.ACTIVATION, StorageKind.INPUT)
    pairs = zip(sizes.items(), kinds, strict=True)
    origin = chain().storages[0].origin
    storages = [
        Storage(name=n, nbytes=b, kind=k, device="cpu", planned=n == "inside", origin=origin) for (n, b), k in pairs
    ]
    graph = Graph(ops=(), values=(), storages=tuple(storages), outputs=(), gradients=())
    assert copied_bytes(graph, 5000, away=False) == 5000
    assert copied_bytes(graph, 5000, away=True) == 5000 + 3000 + 4097 + 3000 + 4
