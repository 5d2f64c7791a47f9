"""Measured, then guided steps: what people do meanwhile, and what cannot be."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch, MemplanError, UnsupportedCall
from memplan.evict.workload import Events, Workload
from memplan.runtime import CompiledModule, CompiledStep
from memplan.runtime.profiling.profile_guided import REPLANS, SAMPLES, WARM
from tests.models import Layers
from tests.runtime.budgets import FAST_LINK, QUICK, everything
from tests.runtime.reference import same_parameters
from tests.runtime.virtual import virtual
from tests.steps import outcome_after, outcome_of

STEPS = WARM + SAMPLES


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Layers(), torch.randn(64, 16)


@pytest.fixture(autouse=True)
def _in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies take three times as long as one op, and say that it was one."""
    with virtual(monkeypatch, lambda _: 3.0, lambda _: 1.0):
        yield


def _compiled(model: nn.Module, x: torch.Tensor, **options: Any) -> CompiledModule:
    settings: dict[str, Any] = {"arena_budget": 0.8, "policy": everything, "costs": "measure", **options}
    compiled = memplan.compile(model, x, **settings)
    assert compiled._calls.guide is not None
    return compiled


def _finish(model: nn.Module, compiled: CompiledModule, x: torch.Tensor) -> None:
    """Train until nothing is measured any more; every step is right."""
    expected = outcome_of(model, memplan.compile(model, x), x)
    for _ in range((REPLANS + 1) * STEPS + 1):
        assert outcome_of(model, compiled, x).same_as(expected)
        if compiled._calls.guide is None:
            return
    raise AssertionError("it never ends")


# -- afterwards, and when nobody asked -------------------------------------------------------------------


def test_nothing_is_measured_afterwards_and_costs_are_saved(tmp_path: Path) -> None:
    model, x = _net()
    compiled = _compiled(model, x)
    main = compiled._calls.programs.main
    assert main.forward is not main.program.forward
    _finish(model, compiled, x)
    main = compiled._calls.programs.main
    assert (main.forward, main.backward) == (main.program.forward, main.program.backward)
    before = compiled.measurements
    assert outcome_of(model, compiled, x).same_as(outcome_of(model, compiled, x))
    assert compiled.measurements == before
    assert compiled.measurement is not None
    path = tmp_path / "costs.json"
    compiled.measurement.costs.save(path)
    again = memplan.compile(model, x, arena_budget=0.8, policy=QUICK, costs=str(path))
    assert again.plan.eviction is not None
    assert again.plan.eviction.costs == compiled.measurement.costs.name


def test_nothing_is_measured_where_nothing_is_evicted() -> None:
    model, x = _net()
    compiled = memplan.compile(model, x, costs="measure", arena_budget=1.0)
    assert compiled._calls.guide is None
    outcome_of(model, compiled, x)
    assert compiled.measurement is None
    assert compiled.plan.arena_size == memplan.plan(model, x).arena_size


# -- what steps are measured -----------------------------------------------------------------------------


def test_steps_that_end_early_are_not_measured() -> None:
    model, x = _net()
    compiled = _compiled(model, x, on_mismatch="error")
    assert compiled._calls.guide is not None
    timer = compiled._calls.guide._op_timer
    compiled(x)  # no backward
    assert timer.samples == 0

    def fail(event: Any) -> None:
        if event.step == event.steps - 3:
            raise RuntimeError("no more")

    with compiled.hooks.add(fail), pytest.raises(RuntimeError, match="no more"):
        outcome_of(model, compiled, x)
    assert timer.samples == 0
    with pytest.raises(InputMismatch):
        compiled(x[:3])
    outcome_of(model, compiled, x)
    assert timer.samples == 1


class Skip(nn.Module):
    """A forward whose first result is used at the end again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = wide = x.exp()
        for _ in range(4):
            wide = torch.cat([wide, wide]).sin()[: len(x)] + 1
        return torch.cat([wide, wide]).sum() + y.sum()


def test_inference_is_measured_too() -> None:
    model, x = Skip().eval(), torch.randn(64, 16)
    compiled = _compiled(model, x, train=False, arena_budget="min", policy=QUICK)
    expected = memplan.compile(model, x, train=False)(x)
    with torch.inference_mode():
        for _ in range(STEPS + 1):
            assert torch.equal(compiled(x), expected)
    assert compiled.measurements


def _is_ready(compiled: memplan.CompiledModule) -> bool:
    assert compiled._calls.guide is not None
    return compiled._calls.guide.ready


def test_a_switch_waits_for_the_step_in_flight() -> None:
    model, x = _net()
    compiled = _compiled(model, x)
    safe = compiled.plan
    for _ in range(STEPS):
        expected = outcome_of(model, compiled, x)
    assert _is_ready(compiled)
    main = compiled._calls.programs.main
    model.zero_grad()
    loss = main(main.input_guards.flatten((x,), {}), training=True)  # as if the guide had not been asked
    assert not _is_ready(compiled)
    assert compiled.plan is safe
    model.zero_grad()
    loss.backward()
    assert outcome_after(model, loss).same_as(expected)
    assert outcome_of(model, compiled, x).same_as(expected)
    assert compiled.plan is not safe


# -- copies ----------------------------------------------------------------------------------------------


# -- other options ---------------------------------------------------------------------------------------


def test_whole_steps() -> None:
    model, x = _net()
    free = copy.deepcopy(model)
    made: dict[str, CompiledStep] = {}
    options: dict[str, Any] = {"arena_budget": 0.7, "policy": everything, "costs": "measure", "sanitize": "poison"}
    for name, m, extra in (("guided", model, options), ("free", free, {})):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
        made[name] = memplan.compile_step(m, optimizer, lambda loss: loss, x, **extra)
    step = made["guided"]
    assert step.measurement is None
    safe = step.plan
    tracker = memplan.Tracker()
    with step.hooks.add(tracker):
        for _ in range(2 * (REPLANS + 1) * STEPS):
            assert torch.equal(step(x), made["free"](x))
            assert same_parameters(model, free)
            if not step._builder.guides:
                break
        assert torch.equal(step(x), made["free"](x))
    assert not step._builder.guides
    assert len(step.measurements) > 1
    assert step.plan.fingerprint != safe.fingerprint
    assert tracker.steps


def test_other_kinds_of_calls_are_not_measured() -> None:
    model, x = _net()
    compiled = _compiled(model, x)
    outcome_of(model, compiled, x[:32])
    _finish(model, compiled, x)
    outcome_of(model, compiled, x[:32])
    for runner in compiled._calls.programs:
        assert runner.forward is runner.program.forward


# -- what cannot be --------------------------------------------------------------------------------------


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    model, x = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MemplanError, match="without a budget"):
        memplan.compile(model, x, costs="measure")
    with pytest.raises(UnsupportedCall, match="one device"):
        memplan.compile(model, x, device=["cpu:0", "cpu:1"], arena_budget=0.7, costs="measure")
    with pytest.raises(MemplanError, match="without a budget"):
        memplan.compile_step(model, optimizer, lambda loss: loss, x, costs="measure")
    with pytest.raises(UnsupportedCall, match="recorded"):
        memplan.compile_step(model, optimizer, lambda loss: loss, x, arena_budget=0.7, costs="measure", cuda_graph=True)
    batch = {"x": {0: torch.export.Dim("batch", max=128)}}
    with pytest.raises(UnsupportedCall, match="one shape"):
        memplan.compile(model, x, arena_budget=0.7, costs="measure", dynamic_shapes=batch)
    with pytest.raises(MemplanError, match="no cost model") as caught:
        memplan.plan(model, x, arena_budget=0.7, costs="measure")
    assert "first steps" in str(caught.value)
    with pytest.raises(MemplanError):
        torch.compile(model, backend=memplan.Backend(arena_budget=0.7, costs="measure"))(x)


@pytest.mark.parametrize("error", [MemplanError("not now"), ValueError("never")])
def test_a_policy_that_fails_later_leaves_the_safe_plan(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    model, x = _net()
    asked = [0]

    def policy(workload: Workload) -> Events:
        asked[0] += 1
        if asked[0] > 1:
            raise error
        return everything(workload)

    compiled = _compiled(model, x, policy=policy)
    safe = compiled.plan
    for _ in range(STEPS):
        expected = outcome_of(model, compiled, x)
    with caplog.at_level(logging.WARNING, "memplan"):
        if isinstance(error, MemplanError):
            assert outcome_of(model, compiled, x).same_as(expected)
            assert "not now" in caplog.records[-1].getMessage()
        else:
            with pytest.raises(ValueError, match="never"):
                compiled(x)
    assert outcome_of(model, compiled, x).same_as(expected)
    assert compiled.plan is safe
    assert compiled._calls.guide is None
    assert FAST_LINK.name != safe.eviction.costs  # type: ignore[union-attr]
