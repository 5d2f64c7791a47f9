"""Hooks see every event of the plan in its order, change no bit, may stop a step, and are gone when they are gone."""

from __future__ import annotations

import re
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
from memplan.runtime.copies.copy_threads import ThreadCopies
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
    runner = compiled._calls.selector.main
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


def test_without_hooks_nothing_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.runtime.codegen import step_ir

    sources: list[str] = []
    define = step_ir.Namespace.define

    def noted(self: step_ir.Namespace, source: str, function: str) -> Any:
        sources.append(source)
        return define(self, source, function)

    monkeypatch.setattr(step_ir.Namespace, "define", noted)
    _, _, compiled = _made("copies")
    _, _, twin = _made("copies")
    assert sources[:2] == sources[2:4]
    assert len(sources) == 4
    handle = twin.hooks.add(lambda _: None)
    handle.remove()
    twin.hooks.add(lambda _: None)
    assert len(sources) == 6, "generated once, when first asked for"
    for plain, observed in zip(sources[2:4], sources[4:6], strict=True):
        one, two = (
            [re.sub(r"\b([kc])\d+", r"\1", line.strip()) for line in s.splitlines()[1:]] for s in (plain, observed)
        )
        calls = iter(two)
        assert all(line in calls for line in one), "the same calls in the same order, and others between them"
        assert len(two) > len(one)
    assert compiled._calls.selector.main.forward is compiled._calls.selector.main.program.forward


@pytest.mark.parametrize("kind", ["free", "copies"])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("when", When)
def test_a_veto_surfaces_and_the_next_step_is_right(kind: str, phase: Phase, when: When) -> None:
    model, args, compiled = _made(kind)
    copies = compiled._calls.arena.copies
    assert isinstance(copies, ThreadCopies)
    expected = outcome_of(model, compiled, *args, seed=0)
    copies.before_each(lambda _: time.sleep(0.0005))
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
        assert not any(lane.pending for lane in copies._lanes.values())
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
    handle.remove()
    handle.remove()
    count = len(events)
    with torch.no_grad():
        compiled(*args)
    assert len(events) == count


def test_hooks_follow_parameters_that_move() -> None:
    model, args, compiled = _made("free")
    compiled.hooks.add(lambda _: None)
    outcome_of(model, compiled, *args, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data * 2
    expected = outcome_of(model, model, *args, seed=0)
    found = outcome_of(model, compiled, *args, seed=0)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-4, atol=1e-6)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_whole_steps(accumulate: int) -> None:
    model, args = ZOO["mlp"]("nano")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = compile_step(model, optimizer, lambda x: x, args, accumulate=accumulate)
    torch.manual_seed(0)
    expected = [step(*args) for _ in range(2 * accumulate)]
    events: list[StepEvent] = []
    torch.manual_seed(0)
    with step.hooks.add(events.append):
        found = [step(*args) for _ in range(2 * accumulate)]
    assert same_tensors(found, expected)
    assert sum(e.step == 0 and e.when is When.START for e in events) == 2 * accumulate
    last = len(events) - next(i for i, e in enumerate(reversed(events)) if e.step == 0 and e.when is When.START) - 1
    _check_events(events[last:], step.plan)


def test_what_cannot_be_a_hook() -> None:
    _, _, compiled = _made("free")
    with pytest.raises(MemplanError, match="cannot be called"):
        compiled.hooks.add(3)  # type: ignore[arg-type]
    assert len(compiled.hooks) == 0


def test_recorded_steps_have_no_hooks() -> None:
    _, _, compiled = _made("free")
    compiled._calls.selector.main.cuda_graphs = object()  # type: ignore[assignment]
    with pytest.raises(UnsupportedCall, match="cuda_graph=True"):
        compiled.hooks.add(lambda _: None)
    assert len(compiled.hooks) == 0
