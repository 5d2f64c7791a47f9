"""The kernels of steps for which none were asked: Inductor's on accelerators, and eager's where they cannot be had."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.trace import default_kernels
from memplan.trace.fused import step as generation
from memplan.trace.fused.deferred import DeferredKernel
from tests.slow import slow

Way = Callable[..., Plan]


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(6, 8)


def _plan(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    plan: Plan = memplan.plan(model, x, **options)
    return plan


def _compile(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    compiled = memplan.compile(model, x, **options)
    compiled(x).sum().backward()
    return compiled.plan


def _backend(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    torch._dynamo.reset()
    backend = memplan.Backend(**options)
    torch.compile(model, backend=backend)(x).sum().backward()
    return backend.graphs[0].plans[0]


def _step(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memplan.compile_step(model, optimizer, lambda y: y.square().mean(), x, **options)
    step(x)
    return step.plan


def _then_update(model: nn.Module, x: torch.Tensor, **options: Any) -> Plan:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    step = memplan.compile_step(model, optimizer, lambda y: y.square().mean(), x, **options)
    step(x)
    return step.plan


WAYS: tuple[Way, ...] = (_plan, _compile, _backend, _step, _then_update)


def _generated(plan: Plan) -> bool:
    return any(op.target.startswith("inductor.") for op in plan.graph.ops)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for an accelerator, for which Inductor can generate kernels."""
    monkeypatch.setattr(default_kernels, "_is_on_accelerator", lambda *_: True)
    monkeypatch.setattr(default_kernels, "find_spec", lambda name: name)


@pytest.mark.parametrize("way", WAYS)
def test_the_cpu_runs_eagers_kernels(way: Way) -> None:
    assert not _generated(way(*_model()))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("way", [way if way is _plan else slow(way) for way in WAYS])
def test_an_accelerator_runs_inductors_kernels(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memplan"):
        assert _generated(way(*_model()))
        assert _generated(way(*_model(), device="cpu"))
        assert not _generated(way(*_model(), kernels="aten"))
    assert "eager's kernels" not in caplog.text


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("way", WAYS)
def test_eagers_kernels_run_what_inductors_refuse_and_the_log_says_so(
    way: Way, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any, **__: Any) -> Any:
        raise UnsupportedGraph("Inductor's code", "has a template", "leave it out", see="inductor-code")

    monkeypatch.setattr(generation, "generate", refusing)
    with caplog.at_level(logging.WARNING, "memplan"):
        assert not _generated(way(*_model()))
    assert caplog.text.count("runs eager's kernels") == 1
    assert "has a template" in caplog.text
    if way is _plan:  # others run as eager what cannot be planned
        with pytest.raises(UnsupportedGraph, match="has a template"):
            way(*_model(), kernels="inductor")


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("way", WAYS[1:])
def test_eagers_kernels_run_where_no_compiler_makes_inductors(
    way: Way, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*_: Any) -> Any:
        raise UnsupportedGraph("a kernel", "Inductor cannot compile it: no gcc", "install it", see="inductor-refuses")

    monkeypatch.setattr(DeferredKernel, "start", refusing)
    monkeypatch.setattr(DeferredKernel, "compiled", refusing)
    with caplog.at_level(logging.WARNING, "memplan"):
        assert not _generated(way(*_model()))
    assert caplog.text.count("runs eager's kernels") == 1
    assert "no gcc" in caplog.text


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(
    ("way", "options"),
    [
        (_plan, {"checkpoint": "plan"}),
        (_plan, {"compress": "int8"}),
        (_plan, {"divide": 2}),
        (_plan, {"device": ["cpu:0", "cpu:1"]}),
        (_compile, {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},)}),
    ],
)
def test_options_that_inductors_kernels_do_not_have_yet_take_eagers(
    way: Way, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "memplan"):
        assert not _generated(way(*_model(), **options))
    assert caplog.text.count("runs eager's kernels") == 1


@pytest.mark.usefixtures("on_device")
def test_without_triton_eagers_kernels_run(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_kernels, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "memplan"):
        assert not _generated(_compile(*_model()))
    assert "triton is not installed" in caplog.text


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("kernels", ["aten", slow("inductor")])
def test_a_given_plan_has_its_kernels(kernels: Any, tmp_path: Path) -> None:
    model, x = _model()
    memplan.plan(model, x, kernels=kernels).save(tmp_path / "plan.json")
    compiled = memplan.compile(model, x, plan=tmp_path / "plan.json")
    assert _generated(compiled.plan) is (kernels == "inductor")
    expected = model(x)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-6)
