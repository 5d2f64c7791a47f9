"""Gathers that start before they are needed: in the bytes that are free, in one order, and what the checks refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.core.collectives import GATHER, WAIT, Collective
from memplan.core.evictions import EvictionPlan, check_record
from memplan.core.graph import Graph, Op, Phase, StorageKind
from memplan.core.happens_before import follow, require_no_races
from memplan.core.legal_orders import require_legal
from memplan.core.plan import Plan
from memplan.core.problem import Interval, Problem
from memplan.core.schedule import Schedule, make_schedule
from memplan.errors import InvalidEviction, InvalidPlan, InvalidSolution
from memplan.evict.costs import DEVICES, CostModel, Link, simulate
from memplan.evict.equivalent import require_equivalent
from memplan.planning.base_graph import without_evictions
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.planning.overlapped import with_overlap
from memplan.planning.planfile import check_consistency, load
from tests.graph_strategies import GraphBuilder

SIZE = 1024
LAYERS = 6
# A gather takes as long as two ops: 2 us; each op takes 1 us.
COSTS: CostModel = replace(
    DEVICES["h100"],
    name="slow link",
    launch=1e-6,
    bytes_per_second=1e18,
    between_ranks=Link(bytes_per_second=SIZE / 2e-6, latency=0.0),
)


def _step(*, cast: bool = False, alignment: int = 64) -> ScheduledGraph:
    """A step of layers, each with a parameter that is gathered for it, first `cast`, and gradients that are reduced."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    shards = [b.storage(StorageKind.PARAMETER, SIZE // 2, planned=False) for _ in range(LAYERS)]
    wholes, saved = [], [x]
    for shard in shards:
        given = shard
        if cast:
            given = b.storage(StorageKind.ACTIVATION, SIZE // 2, planned=True)
            b.op(Phase.FORWARD, (shard,), (given,), target="aten._to_copy.default")
        wholes.append(b.storage(StorageKind.ACTIVATION, SIZE, planned=True))
        b.op(Phase.FORWARD, (given,), (wholes[-1],), target="memplan_distributed.gather_parameter.default")
        saved.append(b.storage(StorageKind.ACTIVATION, SIZE, planned=True))
        b.op(Phase.FORWARD, (saved[-2], wholes[-1]), (saved[-1],), target="aten.mm.default")
    gradients = []
    for whole, activation in zip(reversed(wholes), reversed(saved), strict=False):
        gradient = b.storage(StorageKind.ACTIVATION, SIZE, planned=True)
        b.op(Phase.BACKWARD, (activation, whole), (gradient,), target="aten.mm.default")
        gradients.append(b.storage(StorageKind.GRADIENT, SIZE // 2, planned=False))
        b.op(Phase.BACKWARD, (gradient,), (gradients[-1],), target="memplan_distributed.reduce_scatter.default")
    graph = b.graph((), tuple(gradients))
    ops = (replace(op, group="0") if op.target.startswith("memplan") else op for op in graph.ops)
    graph = replace(graph, ops=tuple(ops))
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "traced")
    return ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=alignment, versions={})


def _early(step: ScheduledGraph, room: int = 0, **options: Any) -> Plan:
    """The plan of a step whose arena may have `room` more bytes than it needs without early gathers."""
    plan = make_plan(step)
    if room:
        plan = replace(plan, eviction=_record(plan, plan.arena_size + room))
    return with_overlap(step, plan, PlanOptions(**options), COSTS)


def _record(plan: Plan, arena_budget: int) -> EvictionPlan:
    """The record of a budget that nothing had to be evicted for."""
    return EvictionPlan(
        policy="recompute",
        costs=COSTS.name,
        arena_budget=arena_budget,
        seconds=0.0,
        base_seconds=0.0,
        stall=0.0,
        sources=plan.schedule.order,
        instances=(),
        host=memplan.solve(Problem(buffers=())),
    )


def _gathers(plan: Plan) -> list[Collective]:
    return [c for c in plan.collectives if c.gathers]


@pytest.mark.parametrize("cast", [False, True])
def test_gathers_start_in_bytes_that_are_free(cast: bool) -> None:
    step = _step(cast=cast)
    plain, plan = make_plan(step), _early(step)
    assert plan.arena_size <= plain.arena_size
    gathers = _gathers(plan)
    assert sum(g.early for g in gathers) == LAYERS - 1, "all but the first, before which there is nothing"
    assert [g.name for g in gathers] == [c.name for c in plain.collectives if c.gathers]
    assert plan.eviction is not None
    assert plan.eviction.seconds < simulate(step.graph, COSTS)[0]
    check_consistency(plan)
    check_record(plan.graph, plan.eviction)
    require_equivalent(step.graph, plan.graph, plan.eviction.sources)
    assert follow(plan).races == ()
    assert follow(plan).copies == 2 * LAYERS - 1, "and all reductions"
    restored = without_evictions(plan)
    assert restored.graph == step.graph
    require_legal(restored.graph, restored.schedule.order)
    assert cast or restored.schedule.order == step.schedule.order, "casts stay where they were moved to"


def test_where_the_arena_is_full_no_gather_starts_early() -> None:
    """Each op needs all of an arena of three tensors, but for the first, whose input is outside of it."""
    b = GraphBuilder()
    x = b.storage(StorageKind.INPUT, SIZE, planned=False)
    for _ in range(LAYERS):
        shard = b.storage(StorageKind.PARAMETER, SIZE // 2, planned=False)
        whole, result = (b.storage(StorageKind.ACTIVATION, SIZE, planned=True) for _ in range(2))
        b.op(Phase.FORWARD, (shard,), (whole,), target="memplan_distributed.gather_parameter.default")
        b.op(Phase.FORWARD, (x, whole), (result,), target="aten.mm.default")
        x = result
    graph = b.graph()
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "traced")
    step = ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=64, versions={})
    tight, roomy = _early(step), _early(step, room=SIZE)
    assert tight.arena_size == 3 * SIZE
    assert [g.early for g in _gathers(tight)] == [False, True] + [False] * (LAYERS - 2)
    assert roomy.arena_size == 4 * SIZE
    assert [g.early for g in _gathers(roomy)] == [False] + [True] * (LAYERS - 1)
    assert roomy.eviction is not None
    assert roomy.eviction.seconds < simulate(graph, COSTS)[0]


def test_what_a_collective_takes_beside_the_arena_is_counted_until_its_wait() -> None:
    plan = _early(_step(), room=8 * SIZE)
    nothing = replace(plan, temporaries=(0,) * len(plan.graph.ops))
    counted = replace(plan, temporaries=_copies(plan.graph))
    gathers = _gathers(plan)
    flying = [sum(SIZE for g in gathers if g.step <= step <= g.waited) for step in range(len(plan.graph.ops))]
    pairs = zip(counted.outside_profile, nothing.outside_profile, strict=True)
    assert [one - other for one, other in pairs] == flying
    assert counted.outside["temporaries"] == max(flying) > SIZE
    assert nothing.total < counted.total <= nothing.total + max(flying)


def test_a_budget_of_the_total_is_kept_with_what_is_under_way() -> None:
    """The arena has room for gathers that start early, and what is beside it has not."""
    step = _step()
    plain = make_plan(step)
    plain = replace(plain, temporaries=_copies(plain.graph), eviction=_record(plain, plain.arena_size + 8 * SIZE))
    assert plain.eviction is not None
    free = with_overlap(step, plain, PlanOptions(), COSTS)
    limit = plain.total
    within = with_overlap(step, replace(plain, eviction=replace(plain.eviction, budget=limit)), PlanOptions(), COSTS)
    assert any(g.early for g in _gathers(free))
    assert free.total > limit >= within.total


def _copies(graph: Graph) -> tuple[int, ...]:
    """The bytes beside the arena where each gather copies its result."""
    return tuple(SIZE if op.target == GATHER else 0 for op in graph.ops)


def test_a_buffer_that_is_released_before_its_wait_is_refused() -> None:
    plan = _early(_step(cast=True))
    gather = next(g for g in _gathers(plan) if g.early)
    op = plan.graph.ops[plan.schedule.order[gather.step]]
    source = plan.graph.storages[plan.graph.values[op.reads[0]].storage].name
    shorter = tuple(
        replace(b, live=Interval(b.live.start, gather.step + 1)) if b.id == source else b for b in plan.problem.buffers
    )
    with pytest.raises(InvalidPlan, match="does not follow from the graph and the schedule"):
        check_consistency(replace(plan, problem=replace(plan.problem, buffers=shorter)))
    other = next(
        b for b in plan.problem.buffers if gather.step < b.live.start <= gather.waited and b.id != source and b.size
    )
    offsets = {**plan.solution.offsets, other.id: plan.solution.offsets[source]}
    moved = replace(plan, solution=replace(plan.solution, offsets=offsets))
    with pytest.raises(InvalidSolution, match="are both alive"):
        check_consistency(moved)
    with pytest.raises(InvalidPlan, match="in any order"):
        require_no_races(moved)


def test_without_its_wait_a_gather_races() -> None:
    plan = _early(_step())
    waits = [i for i, index in enumerate(plan.schedule.order) if plan.graph.ops[index].target == WAIT]
    assert len(waits) == 2 * LAYERS - 1
    for wait in waits:
        races = follow(plan, without={wait}).races
        assert races, "the op after it reads what is not there yet"
    starts = [g.step for g in _gathers(plan) if g.early]
    assert any(follow(plan, unordered={start}).races for start in starts), "a start waits for the last use of its bytes"
    gone = replace(plan.graph, ops=tuple(op for op in plan.graph.ops if op.target != WAIT))
    order = make_schedule(gone, tuple(range(len(gone.ops))), "given")
    with pytest.raises(InvalidPlan, match="in any order"):
        require_no_races(_placed(plan, gone, order))


def _placed(plan: Plan, graph: Graph, schedule: Schedule) -> Plan:
    step = ScheduledGraph(model="m", graph=graph, schedule=schedule, alignment=plan.alignment, versions={})
    return make_plan(step)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda op: replace(op, starts=False), "was not started"),
        (lambda op: op if op.target != WAIT else replace(op, reads=op.reads[::-1]), "does not wait for a result"),
        (lambda op: replace(op, starts=op.target == "aten.mm.default"), "is no collective that could be waited for"),
    ],
)
def test_graphs_that_do_not_wait_for_what_they_start_are_refused(change: Any, words: str) -> None:
    step = _step()
    plan = _early(step)
    assert plan.eviction is not None
    changed = replace(plan.graph, ops=tuple(change(op) for op in plan.graph.ops))
    with pytest.raises(InvalidEviction, match=words):
        require_equivalent(step.graph, changed, plan.eviction.sources)


def test_a_saved_plan_knows_its_starts_and_waits(tmp_path: Any) -> None:
    plan = _early(_step())
    plan.save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan
    starts = {op.name for op in plan.graph.ops if op.starts}
    assert {f"wait:{name}" for name in starts} == {op.name for op in plan.graph.ops if op.target == WAIT}
    without = replace(plan.graph, ops=tuple(_never_started(op) for op in plan.graph.ops))
    assert without.fingerprint != plan.graph.fingerprint


def _never_started(op: Op) -> Op:
    return replace(op, starts=False)
