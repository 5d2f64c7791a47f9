"""Hooks see every event of the plan in its order, change no bit, may stop a step, and are gone when they are gone."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.zoo import ZOO
from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT, Action
from memplan.core.graph import Phase
from memplan.core.plan import Plan
from memplan.errors import MemplanError, StaleActivationsError, UnsupportedCall
from memplan.planning.options import PlanOptions
from memplan.runtime import CompiledModule, compile_step
from memplan.runtime import compile as memplan_compile
from memplan.runtime.copies import ThreadCopies
from memplan.runtime.debug.hooks import EventKind, StepEvent, When
from memplan.trace import plan_traced, trace
from tests.runtime.budgets import FAST_LINK, QUICK_RECOMPUTE, plan_of_everything
from tests.slow import slow
from tests.steps import outcome_of, same_tensors

_TRANSFERS = {
    OFFLOAD: EventKind.OFFLOAD,
    OFFLOAD_WAIT: EventKind.OFFLOAD_WAIT,
    RELOAD: EventKind.RELOAD,
    RELOAD_WAIT: EventKind.RELOAD_WAIT,
}


def _made(kind: str, name: str = "mlp") -> tuple[torch.nn.Module, tuple[Any, ...], CompiledModule]:
    model, args = ZOO[name]("nano")
    if kind == "free":
        return model, args, memplan_compile(model, args)
    traced = trace(model, args)
    if kind == "copies":
        plan = plan_of_everything(traced)
    else:
        plan = plan_traced(traced, PlanOptions(arena_budget="min", policy=QUICK_RECOMPUTE, costs=FAST_LINK))
    return model, args, memplan_compile(model, args, plan=plan, sanitize="poison")


def _check_events(events: list[StepEvent], plan: Plan) -> None:
    ops = [plan.graph.ops[i] for i in plan.schedule.order]
    for when in When:
        seen = [e for e in events if e.when is when and e.kind is not EventKind.EVICT]
        assert [e.step for e in seen] == list(range(len(ops)))
        for event, op in zip(seen, ops, strict=True):
            assert (event.op, event.target, event.phase) == (op.name, op.target, op.phase.value)
            assert (event.module, event.source, event.steps) == (op.origin.module, op.origin.source, len(ops))
            assert _TRANSFERS.get(op.target, event.kind) is event.kind
            again = plan.eviction is not None and "@" in op.name and op.target not in _TRANSFERS
            assert (event.kind is EventKind.RECOMPUTE) is again
    assert [e.step for e in events] == sorted(e.step for e in events)
    starts, ends = ([i for i, e in enumerate(events) if e.when is when and e.kind != "evict"] for when in When)
    assert all(a < b for a, b in zip(starts, ends, strict=True))
    evicted = Counter(e.storage for e in events if e.kind is EventKind.EVICT)
    assert evicted == Counter(e.storage for e in plan.evictions)
    for e in plan.evictions:
        assert any(e.evicted_access <= v.step < e.in_trigger for v in events if v.kind is EventKind.EVICT)
        trigger = next(v for v in events if v.step == e.in_trigger)
        assert trigger.kind is (EventKind.RELOAD if e.action is Action.OFFLOAD else EventKind.RECOMPUTE)
        if e.action is Action.OFFLOAD:
            assert trigger.storage == e.storage


@pytest.mark.parametrize(
    ("kind", "name"), [("free", "mlp"), ("copies", "mlp"), ("recompute", "mlp"), slow("copies", "gpt2")]
)
def test_events_are_the_plans_and_bits_stay(kind: str, name: str) -> None:
    model, args, compiled = _made(kind, name)
    runner = compiled._calls.programs.main
    plain = runner.forward, runner.backward
    expected = outcome_of(model, compiled, *args, seed=0)
    events: list[StepEvent] = []
    other: list[StepEvent] = []
    with compiled.hooks.add(events.append), compiled.hooks.add(other.append):
        assert runner.forward is not plain[0]
        assert outcome_of(model, compiled, *args, seed=0).same_as(expected)
        _check_events(events, compiled.plan)
        assert other == events
        assert {e.phase for e in events} == {p.value for p in Phase}
        outcome_of(model, compiled, *args, seed=0)
        assert events == 2 * other[: len(other) // 2]
    assert (runner.forward, runner.backward) == plain
    count = len(events)
    assert outcome_of(model, compiled, *args, seed=0).same_as(expected)
    assert len(events) == count
    assert len(compiled.hooks) == 0


@pytest.mark.parametrize("kind", ["free", "copies"])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("when", When)
def test_a_veto_surfaces_and_the_next_step_is_right(kind: str, phase: Phase, when: When) -> None:
    model, args, compiled = _made(kind)
    copies = compiled._calls.arena.copies
    assert isinstance(copies, ThreadCopies)
    expected = outcome_of(model, compiled, *args, seed=0)
    copies.before = lambda _: time.sleep(0.0005)
    ops = compiled.plan.graph.ops
    order = [i for i in compiled.plan.schedule.order if ops[i].phase is phase]
    for index in (order[0], order[len(order) // 2], order[-1]):
        ran: list[str] = []

        def veto(event: StepEvent, name: str = ops[index].name, ran: list[str] = ran) -> None:
            ran.append(event.op)
            if event.op == name and event.when is when:
                raise RuntimeError(f"not {name}")

        with compiled.hooks.add(veto), pytest.raises(RuntimeError, match=f"^not {ops[index].name}$"):
            outcome_of(model, compiled, *args, seed=0)
        assert ran[-1] == ops[index].name, "nothing ran after it"
        assert not copies.pending
        assert outcome_of(model, compiled, *args, seed=0).same_as(expected)


def test_a_backward_that_was_stopped_cannot_go_on() -> None:
    model, args, compiled = _made("free")
    loss = compiled(*args)

    def veto(event: StepEvent) -> None:
        raise KeyboardInterrupt

    with compiled.hooks.add(veto), pytest.raises(KeyboardInterrupt):
        loss.backward()
    with pytest.raises((StaleActivationsError, RuntimeError)):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_programs_of_other_modes_are_seen_too() -> None:
    _, args, compiled = _made("free")
    events: list[StepEvent] = []
    handle = compiled.hooks.add(events.append)
    with torch.no_grad():
        compiled(*args)
    assert events
    assert {e.phase for e in events} == {"forward"}
    assert events[-1].step == events[-1].steps - 1
    with pytest.raises(MemplanError, match="cannot be called"):
        compiled.hooks.add(3)  # type: ignore[arg-type]
    handle.remove()
    handle.remove()
    count = len(events)
    with torch.no_grad():
        compiled(*args)
    assert len(events) == count


def test_whole_steps() -> None:
    model, args = ZOO["mlp"]("nano")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = compile_step(model, optimizer, lambda x: x, args)
    torch.manual_seed(0)
    expected = [step(*args) for _ in range(4)]
    events: list[StepEvent] = []
    torch.manual_seed(0)
    with step.hooks.add(events.append):
        found = [step(*args) for _ in range(4)]
    assert same_tensors(found, expected)
    assert sum(e.step == 0 and e.when is When.START for e in events) == 4
    last = len(events) - next(i for i, e in enumerate(reversed(events)) if e.step == 0 and e.when is When.START) - 1
    _check_events(events[last:], step.plan)


def test_recorded_steps_have_no_hooks() -> None:
    _, _, compiled = _made("free")
    compiled._calls.programs.main.cuda_graphs = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedCall, match="cuda_graph=True"):
        compiled.hooks.add(lambda _: None)
    assert len(compiled.hooks) == 0
