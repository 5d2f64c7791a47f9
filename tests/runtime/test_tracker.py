"""What the tracker counts while steps run is what the plan's problem has, and what its simulation says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.zoo import ZOO
from memplan.core.lifetimes import host_problem
from memplan.core.plan import Plan
from memplan.core.problem import Problem
from memplan.planning.options import PlanOptions
from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from memplan.runtime.debug.hooks import HeldBytes, Tracker
from memplan.trace import plan_traced, trace
from memplan.trace.traced import TracedGraph
from tests.runtime.budgets import FAST_LINK, QUICK
from tests.slow import slow


def _alive(problem: Problem, held: HeldBytes, step: int) -> bool:
    alive = problem.alive_at(step)
    names = {b.id for b in alive}
    return len(held.tensors) == len(names) and set(held.tensors) == names and held.nbytes == sum(b.size for b in alive)


def _check(tracker: Tracker, plan: Plan) -> None:
    host = host_problem(plan.graph, plan.schedule, alignment=plan.alignment)
    assert [t.step for t in tracker.steps] == list(range(len(plan.schedule.order)))
    for tracked, index in zip(tracker.steps, plan.schedule.order, strict=True):
        assert tracked.op == plan.graph.ops[index].name
        assert _alive(plan.problem, tracked.arena, tracked.step)
        assert _alive(host, tracked.host, tracked.step)
    assert tracker.peak == plan.max_live <= plan.arena_size
    assert tracker.host_peak == host.max_live <= plan.host_size


def _run(model: torch.nn.Module, args: tuple[Any, ...], plan: Plan) -> Tracker:
    compiled = memplan_compile(model, args, plan=plan)
    tracker = Tracker()
    with compiled.hooks.add(tracker):
        for _ in range(2):  # each step begins anew
            loss = compiled(*args)
            assert tracker.now is not None
            assert tracker.now.step == plan.graph.forward_ops - 1
            loss.backward()
    return tracker


def _budgeted(traced: TracedGraph) -> Plan:
    return plan_traced(traced, PlanOptions(arena_budget="min", policy=QUICK, costs=FAST_LINK))


@pytest.mark.parametrize(
    ("name", "budget"),
    [("mlp", False), ("mlp", True), slow("gpt2", True), slow("resnet", True)],
)
def test_counts_what_the_plan_has(name: str, budget: bool) -> None:
    model, args = ZOO[name]("nano")
    traced = trace(model, args)
    plan = _budgeted(traced) if budget else plan_traced(traced)
    assert bool(plan.evictions) is budget
    assert (plan.host_size > 0) is budget, "fast links: what is evicted is copied"
    _check(_run(model, args, plan), plan)


def test_whole_steps() -> None:
    model, args = ZOO["mlp"]("nano")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = compile_step(model, optimizer, lambda x: x, args)
    tracker = Tracker()
    step.hooks.add(tracker)
    step(*args)
    _check(tracker, step.plan)


def test_a_step_that_ends_early_leaves_nothing_to_the_next() -> None:
    model, args = ZOO["mlp"]("nano")
    compiled = memplan_compile(model, args)
    tracker = Tracker()
    compiled.hooks.add(tracker)
    compiled(*args)  # never run backward
    with torch.no_grad():
        compiled(*args)
    compiled(*args).backward()
    _check(tracker, compiled.plan)
