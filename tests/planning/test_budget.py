"""Budgets as people give them, plans that keep them, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memplan
from benchmarks.zoo import ZOO
from memplan.core.evictions import Action
from memplan.core.graph import Graph, Op, Origin, Phase, StorageKind, Value
from memplan.core.plan import Plan
from memplan.core.schedule import working_set
from memplan.core.validate import validate
from memplan.errors import BudgetInfeasible, InvalidCosts, InvalidPlan, UnreadableFile
from memplan.evict.costs import DEVICES, CostModel, Link, cost_model, flops_of, load_costs
from memplan.evict.equivalent import require_equivalent
from memplan.evict.measure import measure
from memplan.planning.budget import plan_within
from memplan.planning.fit import make_workload
from memplan.planning.frontier import frontier
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import Budget, PlanOptions
from memplan.planning.planfile import check_consistency, load
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder
from tests.runtime.budgets import QUICK

SIZE = 1 << 20


def chain(length: int = 6, *, size: int = SIZE) -> Graph:
    """A forward that saves a tensor per layer, and a backward that needs them in reverse."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, size, planned=False)
    saved = [x]
    for _ in range(length):
        saved.append(b.storage(StorageKind.ACTIVATION, size, planned=True))
        b.op(Phase.FORWARD, (saved[-2],), (saved[-1],))
    gradient = saved[-1]
    for layer in reversed(range(length)):
        made = b.storage(StorageKind.GRADIENT, size, planned=True)
        b.op(Phase.BACKWARD, (gradient, saved[layer + 1]), (made,))
        gradient = made
    kept = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.BACKWARD, (gradient,), (kept,))
    return b.graph(gradients=(kept,))


def scheduled(graph: Graph, *, reserve: int = 0) -> ScheduledGraph:
    """Return a graph in traced order."""
    return ScheduledGraph(
        model="chain", graph=graph, schedule=traced(graph), alignment=64, versions={}, reserve=reserve
    )


def within(
    arena_budget: Budget, graph: Graph | None = None, *, redzone: int = 0, room: int = 0, **options: Any
) -> Plan:
    made = replace(scheduled(chain() if graph is None else graph), redzone=redzone)
    asked = PlanOptions(arena_budget=arena_budget, **options)
    return plan_within(made, asked, cost_model(asked.costs or "a100"), room=room)


def need(graph: Graph) -> int:
    workload = make_workload(graph, traced(graph).order, DEVICES["a100"], 64)
    return measure(workload, workload.plain).peak


@pytest.mark.parametrize("budget", [5 * SIZE, "5 MiB", "5242880"])
def test_a_budget_is_kept_in_bytes_of_the_arena(budget: Budget) -> None:
    plan = within(budget)
    assert need(chain()) == 7 * SIZE
    assert plan.arena_size <= 5 * SIZE
    assert plan.eviction is not None
    assert plan.eviction.arena_budget == 5 * SIZE
    assert plan.evictions
    validate(plan.problem, plan.solution)
    require_equivalent(chain(), plan.graph, plan.eviction.sources)


@pytest.mark.parametrize(("budget", "share"), [(0.75, 0.75), ("60%", 0.6), (1.0, 1.0)])
def test_a_share_is_of_the_need_without_a_budget(budget: Budget, share: float) -> None:
    plan = within(budget)
    assert plan.eviction is not None
    assert plan.eviction.arena_budget == int(need(chain()) * share)
    assert plan.arena_size <= plan.eviction.arena_budget


def test_min_is_the_smallest_and_what_an_error_names() -> None:
    least = within("min").arena_size
    assert least <= 4 * SIZE
    with pytest.raises(BudgetInfeasible, match="op") as caught:
        within(2 * SIZE)
    assert caught.value.op in {op.name for op in chain().ops}
    assert within(caught.value.smallest).arena_size <= caught.value.smallest
    assert str(caught.value.smallest) in str(caught.value)


def test_plans_with_evictions_are_saved_and_read_strictly(tmp_path: Path) -> None:
    plan = within("5MiB")
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan
    assert plan.eviction is not None
    for wrong in (
        replace(plan.eviction, arena_budget=plan.arena_size - 1),
        replace(plan.eviction, sources=plan.eviction.sources[1:]),
        replace(plan.eviction, sources=(-1, *plan.eviction.sources[1:])),
        replace(plan.eviction, instances=((0, 10_000),)),
        replace(plan.eviction, seconds=-1.0),
        replace(plan.eviction, stall=plan.eviction.seconds * 2),
        replace(plan.eviction, instances=plan.eviction.instances[::-1]),
    ):
        with pytest.raises(InvalidPlan):
            check_consistency(replace(plan, eviction=wrong))


@pytest.mark.parametrize(
    "options", [{"arena_budget": 0.8}, {"arena_budget": 0.8, "policy": "flow"}, {"checkpoint": "follow"}]
)
def test_a_plan_with_evictions_has_a_bound_of_all_orders(options: dict[str, Any], tmp_path: Path) -> None:
    model, inputs = ZOO["gpt2" if "checkpoint" in options else "resnet"]()
    if "checkpoint" in options:
        model.model.activation_checkpointing_enable()  # type: ignore[operator, union-attr]
    plan = memplan.plan(model, inputs, **options)
    assert plan.evictions
    assert working_set(plan.graph)[0] < plan.schedule.bound <= plan.schedule.max_live
    plan.save(tmp_path / "plan.json")
    assert memplan.load(tmp_path / "plan.json") == plan  # proven again


def test_the_frontier_rises_as_the_budget_falls() -> None:
    found = frontier(scheduled(chain(10)), costs="a100", shares=(1.0, 0.8, 0.6, 0.5, 0.1))
    kept = [p for p in found.points if p.plan is not None]
    assert [p.budget for p in found.points] == sorted((p.budget for p in found.points), reverse=True)
    assert kept[0].overhead == 0
    assert kept[0].budget == found.most
    assert kept[-1].budget < found.eager // 2
    assert all(p.total <= p.budget for p in kept)
    assert found.points[-1].plan is None
    assert [p.seconds for p in kept] == sorted(p.seconds for p in kept)


def test_cost_models_are_saved_and_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = replace(DEVICES["h100"], name="mine", measured={"aten.mm()": 1e-3})
    costs.save(path)
    assert load_costs(path) == costs == cost_model(str(path))
    path.write_text(path.read_text().replace("0.001", "-1"))
    with pytest.raises(InvalidCosts, match="measured"):
        load_costs(path)
    path.write_text("[]")
    with pytest.raises(UnreadableFile, match="not a cost model"):
        load_costs(path)
    with pytest.raises(UnreadableFile, match="cannot be read"):
        load_costs(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(bytes_per_second=0, latency=0),
        lambda: Link(bytes_per_second=1, latency=-1),
        lambda: replace(DEVICES["cpu"], launch=float("nan")),
        lambda: replace(DEVICES["cpu"], bytes_per_second=float("inf")),
    ],
)
def test_costs_that_cannot_be(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidCosts):
        make()


def _op(target: str, reads: list[tuple[int, ...]], writes: list[tuple[int, ...]]) -> tuple[Graph, Op]:
    shapes = [*reads, *writes]
    values = tuple(
        Value(name=f"v{i}", storage=0, dtype="float32", shape=s, strides=(1,) * len(s), offset=0)
        for i, s in enumerate(shapes)
    )
    op = Op(
        name="op",
        target=target,
        phase=Phase.FORWARD,
        reads=tuple(range(len(reads))),
        writes=tuple(range(len(reads), len(shapes))),
        direct=True,
        random=False,
        origin=Origin(),
    )
    return Graph(ops=(op,), values=values, storages=(), outputs=(), gradients=()), op


@pytest.mark.parametrize(
    ("target", "reads", "writes", "flops"),
    [
        ("aten.mm.default", [(3, 4), (4, 5)], [(3, 5)], 2 * 3 * 4 * 5),
        ("aten.addmm.default", [(5,), (3, 4), (4, 5)], [(3, 5)], 2 * 3 * 4 * 5),
        ("aten.mm.out", [(3, 4), (4, 5), (7, 5)], [(3, 5)], 2 * 3 * 4 * 5),  # into a part of the last
        ("aten.addmm.out", [(3, 5), (3, 4), (4, 5), (7, 5)], [(3, 5)], 2 * 3 * 4 * 5),
        ("aten.bmm.default", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], 2 * 2 * 3 * 4 * 5),
        ("aten.convolution.default", [(1, 3, 8, 8), (6, 3, 3, 3), (6,)], [(1, 6, 8, 8)], 2 * 6 * 64 * 27),
        ("aten.add.Tensor", [(3, 4), (3, 4)], [(3, 4)], 0),
    ],
)
def test_flops(target: str, reads: list[tuple[int, ...]], writes: list[tuple[int, ...]], flops: float) -> None:
    assert flops_of(*_op(target, reads, writes)) == flops


def test_the_frontier_keeps_a_limit_of_the_host() -> None:
    graph = chain(10, size=64 * SIZE)
    costs = replace(
        DEVICES["a100"],
        to_host=Link(bytes_per_second=1e15, latency=0.0),
        to_device=Link(bytes_per_second=1e15, latency=0.0),
    )  # copies take no time
    moved = _moved(graph, PlanOptions(), costs)
    assert Action.OFFLOAD in moved
    assert _moved(graph, PlanOptions(host_budget=0), costs) == {Action.RECOMPUTE}
    on_cuda = replace(graph, storages=tuple(replace(s, device="cuda:0") for s in graph.storages))
    for one, copied in ((graph, True), (on_cuda, False)):  # copies of a step on the CPU are not page-locked
        moved = _moved(one, PlanOptions(policy=QUICK, pinned_budget=0), costs)
        assert (Action.OFFLOAD in moved) == copied


def _moved(graph: Graph, options: PlanOptions, costs: CostModel) -> set[Action]:
    """Return how storages return in the plans of a frontier."""
    points = frontier(scheduled(graph), options, costs=costs, shares=(0.5,)).points
    return {e.action for point in points if point.plan is not None for e in point.plan.evictions}
