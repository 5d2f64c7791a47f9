"""Plans with a budget give the same bits as plans without, whatever is computed again or copied away and back."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.zoo import ZOO
from memplan.core.evictions import RELOAD_WAIT, Action
from memplan.core.graph import Graph
from memplan.core.lifetimes import host_problem
from memplan.core.plan import Plan
from memplan.core.schedule import make_schedule
from memplan.errors import BudgetInfeasible, InvalidEviction, InvalidPlan
from memplan.evict.measure import measure
from memplan.evict.workload import Workload
from memplan.planning.fit import make_workload
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.runtime import CompiledModule, compile_step
from memplan.runtime import compile as memplan_compile
from memplan.runtime.copies import ThreadCopies
from memplan.runtime.execute.runner import Runner
from memplan.runtime.memory.arena import arena_for
from memplan.solvers import solve
from memplan.trace import plan_traced, trace
from memplan.trace.traced import TracedGraph
from tests.models import Layers
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE, everything, plan_of_everything, runner_of, step_of
from tests.runtime.reference import same_parameters
from tests.slow import slow
from tests.steps import Outcome, outcome_of


def _slow(_: int) -> None:
    time.sleep(0.0005)


def _copies(runner: Runner) -> ThreadCopies:
    assert isinstance(runner.arena.copies, ThreadCopies)
    return runner.arena.copies


def _plans(traced: TracedGraph) -> Iterator[tuple[str, Plan]]:
    """By what they do. A share below the smallest feasible budget stands for that one."""
    yield "everything", plan_of_everything(traced)
    for policy, name, shares in ((QUICK, "offload", (0.6, 0.4)), (QUICK_RECOMPUTE, "recompute", (0.5,))):
        for share in shares:
            options = PlanOptions(arena_budget=share, policy=policy, costs=FAST_LINK)
            try:
                yield f"{name} {share}", plan_traced(traced, options)
            except BudgetInfeasible as error:
                yield f"{name} min", plan_traced(traced, replace(options, arena_budget=error.smallest))
                break


@pytest.mark.parametrize("name", [name if name == "mlp" else slow(name) for name in ZOO])
def test_bitwise_equal_to_the_step_without_a_budget(name: str) -> None:
    model, args = ZOO[name]("nano")
    before = copy.deepcopy(model.state_dict())

    def steps(plan: Plan) -> list[Outcome]:
        model.load_state_dict(before)
        runner = runner_of(model, traced, plan)
        first = step_of(runner, model, args, 0)
        _copies(runner).before = _slow
        return [first, step_of(runner, model, args, 1)]

    traced = trace(model, args)
    free = plan_traced(traced)
    expected = steps(free)
    for kind, plan in _plans(traced):
        assert plan.evictions, kind
        assert plan.eviction is not None
        assert plan.arena_size <= plan.eviction.arena_budget, kind
        assert (plan.host_size > 0) is any(e.action is Action.OFFLOAD for e in plan.evictions), kind
        assert all(one.same_as(two) for one, two in zip(steps(plan), expected, strict=True)), kind


def _net(batch: int = 8) -> tuple[Layers, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Layers(), (torch.randn(batch, 16),)


@cache
def _traced_net() -> tuple[Layers, tuple[torch.Tensor], TracedGraph, Outcome]:
    """The model, its input, its step and what this computes, for all tests."""
    model, args = _net()
    traced = trace(model, args)
    return model, args, traced, step_of(runner_of(model, traced, plan_traced(traced)), model, args, 0)


@cache
def _plan() -> Plan:
    """The plan of that step which copies all that it can."""
    return plan_of_everything(_traced_net()[2])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_any_copies_at_any_steps_give_the_same_bits(seed: int) -> None:
    generator = random.Random(seed)
    model, args, traced, expected = _traced_net()

    def some(workload: Workload) -> Any:
        """Of the events of `everything`, those of some storages; waits and starts as far apart as they may be."""
        chosen = {s for s in range(len(workload.graph.storages)) if generator.random() < 0.7}
        events = [e for e in everything(workload) if e.kind == 0 or e.of in chosen]
        for _ in range(generator.randrange(200)):
            i = generator.randrange(len(events) - 1)
            one, two = events[i : i + 2]
            touched = workload.graph.touched(workload.graph.ops[two.of if one.kind else one.of])
            if bool(one.kind) is not bool(two.kind) and (one.of if one.kind else two.of) not in touched:
                events[i : i + 2] = two, one
        return tuple(events)

    schedule = plan_traced(traced).schedule
    workload = make_workload(traced.graph, schedule.order, FAST_LINK, 64)
    events = some(workload)
    peak = measure(workload, events).peak
    plan = plan_traced(traced, PlanOptions(arena_budget=peak, policy=lambda _: events, costs=FAST_LINK))
    runner = runner_of(model, traced, plan)
    _copies(runner).before = lambda _: time.sleep(generator.choice((0, 0.0002, 0.002)))
    for _ in range(2):
        assert step_of(runner, model, args, 0).same_as(expected)


def test_slow_copies_change_nothing_but_the_stall() -> None:
    model, args, traced, expected = _traced_net()
    runner = runner_of(model, traced, _plan(), sanitize=None)
    assert step_of(runner, model, args, 0).same_as(expected)
    quick = runner.program.stalled
    gate = threading.Event()
    _copies(runner).before = lambda _: gate.wait(0.02)
    assert step_of(runner, model, args, 0).same_as(expected)
    assert runner.program.stalled > quick


def test_red_zones_hold_with_copies() -> None:
    model, args, traced, expected = _traced_net()
    plan = plan_of_everything(traced, redzone=64)
    assert plan.redzone
    assert step_of(runner_of(model, traced, plan, sanitize="redzone"), model, args, 0).same_as(expected)


def test_an_arena_is_never_larger_than_its_budget() -> None:
    model, args, *_ = _traced_net()
    plan = _plan()
    assert plan.eviction is not None
    assert arena_for(plan, torch.device("cpu")).memory.nbytes == plan.arena_size <= plan.eviction.arena_budget
    tighter = replace(plan, eviction=replace(plan.eviction, arena_budget=plan.arena_size - 1))
    with pytest.raises(InvalidPlan, match="larger than its budget"):
        memplan_compile(model, args, plan=tighter)


# -- steps that end early --------------------------------------------------------------------------------


def _compiled(model: nn.Module, args: tuple[Any, ...]) -> tuple[CompiledModule, ThreadCopies]:
    compiled = memplan_compile(model, args, plan=_plan(), sanitize="poison")
    copies = compiled._calls.arena.copies
    assert isinstance(copies, ThreadCopies)
    return compiled, copies


def test_a_failed_copy_surfaces_and_the_next_step_is_right() -> None:
    model, args = _net()
    compiled, copies = _compiled(model, args)
    expected = outcome_of(model, compiled, *args)
    for fatal in (1, 2, 5):
        left = iter(range(fatal))

        def fail(_: int, left: Iterator[int] = left, last: int = fatal - 1) -> None:
            time.sleep(0.001)
            if next(left, None) == last:
                raise OSError("the link is down")

        copies.before = fail
        with pytest.raises(OSError, match="the link is down"):
            outcome_of(model, compiled, *args)
        assert _none_under_way(copies)
        assert outcome_of(model, compiled, *args).same_as(expected)


def _none_under_way(copies: ThreadCopies) -> bool:
    return not copies.pending


def test_a_forward_that_was_given_up_leaves_no_copy_to_the_next() -> None:
    model, args = _net()
    compiled, copies = _compiled(model, args)
    expected = outcome_of(model, compiled, *args)
    copies.before = _slow
    compiled(*args)  # its copies may outlive it
    with torch.no_grad():
        assert torch.equal(compiled(*args), expected.loss)
    assert outcome_of(model, compiled, *args).same_as(expected)


# -- whole steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "policy"), [(torch.optim.SGD, QUICK), (torch.optim.AdamW, QUICK_RECOMPUTE)], ids=["sgd", "adamw"]
)
def test_whole_steps_equal_those_without_a_budget(make: Any, policy: Any) -> None:
    model, args = _net(batch=64)
    free = copy.deepcopy(model)
    optimizers = [make(m.parameters(), lr=1e-2, fused=True) for m in (model, free)]
    step = compile_step(
        model, optimizers[0], lambda x: x, args, arena_budget=0.7, policy=policy, costs=FAST_LINK, sanitize="poison"
    )
    other = compile_step(free, optimizers[1], lambda x: x, args)
    assert step.plan.evictions
    assert step.plan.arena_size <= 0.7 * other.plan.arena_size
    for seed in range(3):
        torch.manual_seed(seed)
        one = step(*args)
        torch.manual_seed(seed)
        assert torch.equal(one, other(*args))
    assert same_parameters(model, free)


# -- plans from files ------------------------------------------------------------------------------------


def test_a_saved_plan_with_evictions_runs(tmp_path: Path) -> None:
    model, args, _, expected = _traced_net()
    path = tmp_path / "plan.json"
    _plan().save(path)
    compiled = memplan_compile(model, args, plan=path, sanitize="poison")
    assert compiled.plan.evictions == _plan().evictions
    assert outcome_of(model, compiled, *args).same_as(expected)


Evicted = tuple[Graph, tuple[int, ...]]  # with its sources


def _position(graph: Graph, target: str) -> int:
    return next(i for i, op in enumerate(graph.ops) if op.target == target)


def _wait_too_late(graph: Graph, sources: tuple[int, ...]) -> Evicted:
    at = _position(graph, RELOAD_WAIT)
    order = [i for i in range(len(graph.ops)) if i != at]
    order.insert(order.index(at + 1) + 1, at)  # behind its first user
    return replace(graph, ops=tuple(graph.ops[i] for i in order)), tuple(sources[i] for i in order)


def _other_source(graph: Graph, sources: tuple[int, ...]) -> Evicted:
    one, two = [i for i, op in enumerate(graph.ops) if op.target == "aten.tanh.default"][:2]
    swapped = {one: sources[two], two: sources[one]}
    return graph, tuple(swapped.get(i, s) for i, s in enumerate(sources))


TAMPERED = (_wait_too_late, _other_source)


@pytest.mark.parametrize("tamper", TAMPERED)
def test_a_plan_that_would_evict_wrongly_is_refused(tamper: Callable[..., Evicted], tmp_path: Path) -> None:
    (model, args, *_), plan = _traced_net(), _plan()
    assert plan.eviction is not None
    graph, sources = tamper(plan.graph, plan.eviction.sources)
    schedule = make_schedule(graph, tuple(range(len(graph.ops))), "traced")
    wrong = make_plan(
        ScheduledGraph(
            model=plan.model, graph=graph, schedule=schedule, alignment=plan.alignment, versions=plan.versions
        )
    )
    host = solve(host_problem(graph, schedule, alignment=plan.alignment))
    record = replace(plan.eviction, sources=sources, host=host, arena_budget=wrong.arena_size)
    replace(wrong, eviction=record).save(tmp_path / "plan.json")  # whole in itself: checksum, offsets, lifetimes
    with pytest.raises((InvalidEviction, InvalidPlan)) as caught:  # a race is found before wrong contents
        memplan_compile(model, args, plan=tmp_path / "plan.json")
    assert caught.value.where
    assert caught.value.hint
