"""A larger budget costs no more time than a smaller one, on generated steps and on a model."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import DEVICES
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.workload import Events, Workload
from memplan.planning.budget import plan_within
from memplan.planning.checkpoints import plan_checkpointed
from memplan.planning.fit import _RUNGS, fit, make_workload
from memplan.planning.frontier import frontier
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.schedule import traced
from tests.graph_strategies import GraphBuilder
from tests.runtime.budgets import QUICK, QUICK_RECOMPUTE
from tests.slow import slow

UNIT = 1 << 14
SHARES = tuple(1 - k * 0.95 / 14 for k in range(15))  # 100 % to 5 %


def generated(seed: int) -> Graph:
    """A step with saved tensors of different sizes, some of which are read again much later."""
    chance, b = random.Random(seed), GraphBuilder()
    length = chance.randint(4, 14)
    saved = [b.storage(StorageKind.INPUT, 1 << 16, planned=False)]
    for layer in range(length):
        made = b.storage(StorageKind.ACTIVATION, chance.choice([1, 2, 3, 5, 8, 13]) * UNIT, planned=True)
        skips = chance.random() >= 0.6 and layer >= 2
        b.op(Phase.FORWARD, (saved[-1], chance.choice(saved[1:])) if skips else (saved[-1],), (made,))
        saved.append(made)
    gradient = saved[-1]
    for layer in reversed(range(length)):
        made = b.storage(StorageKind.GRADIENT, chance.choice([1, 2, 3]) * UNIT, planned=True)
        also = (chance.choice(saved[1:]),) if chance.random() >= 0.8 else ()
        b.op(Phase.BACKWARD, tuple(dict.fromkeys((gradient, saved[layer + 1], *also))), (made,))
        gradient = made
    kept = b.storage(StorageKind.GRADIENT, 64, planned=False)
    b.op(Phase.BACKWARD, (gradient,), (kept,))
    return b.graph(gradients=(kept,))


def _checkpointed(graph: Graph) -> Graph:
    """Return the step with the ops of the forward in checkpoints of three ops each; the last op is in none."""
    last = graph.forward_ops - 1
    return replace(
        graph, ops=tuple(replace(op, checkpoint=1 + i // 3) if i < last else op for i, op in enumerate(graph.ops))
    )


@pytest.mark.parametrize("policy", [QUICK, QUICK_RECOMPUTE], ids=["auto", "recompute"])
@pytest.mark.parametrize("seed", [18, slow(3), slow(21), slow(51), slow(54)])
def test_times_rise_along_the_frontier_of_generated_steps(seed: int, policy: Any) -> None:
    graph = generated(seed)
    scheduled = ScheduledGraph(model="generated", graph=graph, schedule=traced(graph), alignment=64, versions={})
    found = frontier(scheduled, PlanOptions(policy=policy), costs="a100", shares=SHARES)
    kept = [p for p in found.points if p.plan is not None]
    assert all(one.seconds <= two.seconds for one, two in pairwise(kept))
    assert all(p.total <= p.budget for p in kept)
    lowest = kept[-1].budget
    assert all((p.plan is None) == (p.budget < lowest) for p in found.points), "only smaller ones are not kept"
    named = set[tuple[int, bool]]()
    for point in found.points[::3]:
        asked = PlanOptions(budget=point.budget, policy=policy)
        try:
            assert plan_within(scheduled, asked, DEVICES["a100"]).total <= point.budget
        except BudgetInfeasible as error:
            named.add((error.smallest, error.smallest > point.budget))
    assert len(named) <= 1
    assert all(above for _, above in named)


@given(st.integers(0, 10_000), st.sampled_from([auto, recompute, QUICK, QUICK_RECOMPUTE]))
@settings(max_examples=15)
def test_a_rung_takes_no_more_time_than_a_smaller_one(seed: int, policy: Any) -> None:
    """Budgets that are rungs themselves, by construction: in so small a step, none gives up before the last one."""
    graph = generated(seed)
    workload = make_workload(graph, tuple(range(len(graph.ops))), DEVICES["a100"], 64)
    peak, times = measure(workload, workload.plain).peak, list[float]()
    for k in range(1, _RUNGS + 1):
        with suppress(BudgetInfeasible):
            times.append(fit(graph, workload.within(peak * k // _RUNGS), policy).measured.seconds)
    assert times[-1] == workload.clock[-1]
    assert times == sorted(times, reverse=True)


def test_searches_of_smaller_budgets_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many rungs in a row that bring nothing; that many more are searched where it is higher."""
    graph, searched = generated(18), list[int]()
    workload = make_workload(graph, tuple(range(len(graph.ops))), DEVICES["a100"], 64)
    workload = workload.within(int(measure(workload, workload.plain).peak * 0.9))

    def counted(asked: Workload) -> Events:
        searched.append(asked.budget)
        return auto(asked)

    monkeypatch.setattr("memplan.planning.fit._searches", lambda policy: True)
    found = dict[int, int]()
    for patience in (1, 3, _RUNGS):
        monkeypatch.setattr("memplan.planning.fit._PATIENCE", patience)
        monkeypatch.setattr("memplan.planning.fit._OPS", 0)
        searched.clear()
        fit(graph, workload, counted)
        assert searched == sorted(searched, reverse=True)
        found[patience] = len(searched)
    assert 1 < found[1] < found[3] < found[_RUNGS]


POLICIES = [QUICK, QUICK_RECOMPUTE, "flow", "genoa", "dtr", "delta", "capuchin"]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoints"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy if isinstance(policy, str) else "quick")
@pytest.mark.parametrize("seed", [1, slow(3), slow(18)])
def test_what_asks_for_less_never_gives_more(seed: int, policy: Any, checkpointed: bool) -> None:
    """Shares, "min", and numbers of bytes that are no more than what is needed without a limit."""
    graph = _checkpointed(generated(seed)) if checkpointed else generated(seed)
    scheduled = ScheduledGraph(model="generated", graph=graph, schedule=traced(graph), alignment=64, versions={})
    costs, options = DEVICES["a100"], PlanOptions(policy=policy)
    make = partial(plan_checkpointed, scheduled, options, costs) if checkpointed else partial(make_plan, scheduled)
    unlimited, free = make(), make if checkpointed else None
    for name, need in (("arena_budget", unlimited.arena_size), ("budget", unlimited.total)):
        sizes, refused = dict[Any, int](), set[Any]()
        for limit in ("min", need, need - 1, need * 2 // 3, 1.0, 0.95, 0.9, 0.8, 0.6, 0.4):
            asked: Any = {name: limit}
            try:
                plan = plan_within(scheduled, replace(options, **asked), costs, free=free)
            except BudgetInfeasible:
                refused.add(limit)
                continue
            sizes[limit] = plan.arena_size if name == "arena_budget" else plan.total
            assert sizes[limit] <= need
            if isinstance(limit, int):
                assert sizes[limit] <= limit
            elif isinstance(limit, float) and name == "arena_budget":
                assert sizes[limit] <= limit * need
        if policy != "capuchin":  # may find less for a smaller budget where it finds nothing for a larger one
            assert sizes["min"] <= min(sizes.values())
        assert refused.isdisjoint({need, "min"})
