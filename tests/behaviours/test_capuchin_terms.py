"""Capuchin: what a plan names of each eviction (row P4)."""

from __future__ import annotations

from functools import cache

import pytest

from memplan.core.evictions import RELOAD, TRANSFERS, Action
from memplan.core.plan import Plan
from memplan.planning.options import PlanOptions
from memplan.trace import plan_traced
from tests.models import traced_nano
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE, plan_of_everything
from tests.slow import slow


@cache
def _plan(kind: str, model: str) -> Plan:
    traced = traced_nano(model)
    if kind == "everything":
        return plan_of_everything(traced)
    policy = QUICK if kind == "copies" else QUICK_RECOMPUTE
    return plan_traced(traced, PlanOptions(arena_budget="min", policy=policy, costs=FAST_LINK))


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("mlp", "everything"), ("mlp", "copies"), ("mlp", "recompute"), ("gpt2", "copies"),
        slow("gpt2", "everything"), slow("gpt2", "recompute"),
    ],
)  # fmt: skip
def test_P4_evicted_access_in_trigger_and_back_access_are_ops_of_the_plan(kind: str, model: str) -> None:  # noqa: N802
    plan = _plan(kind, model)
    graph, index = plan.graph, {s.name: i for i, s in enumerate(plan.graph.storages)}
    ops = [graph.ops[i] for i in plan.schedule.order]
    assert plan.evictions
    lives: dict[str, set[int]] = {}
    for e in plan.evictions:
        storage, instance = index[e.storage], index[e.instance]
        lives.setdefault(e.storage, {storage})
        assert e.evicted_access < e.in_trigger < e.back_access
        # the evicted access used it, and nothing does from then to the trigger
        assert lives[e.storage] & set(graph.touched(ops[e.evicted_access]))
        between = [op for op in ops[e.evicted_access + 1 : e.in_trigger] if op.target not in TRANSFERS]
        assert not any((lives[e.storage] | {instance}) & set(graph.touched(op)) for op in between)
        # the trigger makes the new life, and is the first to touch it
        trigger = ops[e.in_trigger]
        assert instance in graph.written(trigger)
        assert (trigger.target == RELOAD) is (e.action is Action.OFFLOAD)
        assert not any(instance in graph.touched(op) for op in ops[: e.in_trigger])
        # the back access is the first op that reads it again
        reads = [
            step
            for step, op in enumerate(ops)
            if instance in graph.touched(op) and instance not in graph.written(op) and op.target not in TRANSFERS
        ]
        assert reads[0] == e.back_access
        lives[e.storage].add(instance)
