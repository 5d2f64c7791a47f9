"""Tests of several calls with one backward: each adds its gradients to those of the first, which wait in autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.peak_measure import live_bytes
from memplan.runtime.execute import autograd_step
from memplan.runtime.memory import handed_gradients
from memplan.runtime.memory.arena_parts import ObservedOwnership
from memplan.runtime.memory.handed_gradients import HandedGradients
from tests.runtime.allocated import allocations

ROWS, WIDTH = 4, 64
WAYS = ["compile", "backend"]
Loss = Callable[[Any, Sequence[torch.Tensor], nn.Module], Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _compiled(model: nn.Module, way: str, x: torch.Tensor) -> Any:
    if way == "eager":
        return model
    return memplan.compile(model, x) if way == "compile" else torch.compile(model, backend=memplan.Backend())


def _inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.rand(ROWS, WIDTH) for _ in range(count)]


def _pairs(model: Any, inputs: Sequence[torch.Tensor], original: nn.Module) -> Any:
    first, *others = [model(x) for x in inputs]
    return torch.stack([(other - first).square().mean() for other in others]).sum()


def _gradients(loss: Loss, way: str, calls: int = 3, steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Return the gradients after a few steps, of which the last two have gradients to add to."""
    torch._dynamo.reset()
    model, inputs = _model(), _inputs(calls)
    compiled = _compiled(model, way, inputs[0])
    for step in range(steps):
        if step < 2:
            model.zero_grad()
        loss(compiled, inputs, model).backward(**options)
    return [p.grad for p in model.parameters() if p.grad is not None]


def _peak(way: str, calls: int) -> int:
    torch._dynamo.reset()
    model, inputs = _model(), _inputs(calls)
    compiled = _compiled(model, way, inputs[0])

    def step() -> None:
        model.zero_grad()
        _pairs(compiled, inputs, model).backward()

    for _ in range(4):
        step()
    allocations(step)  # sizes of what the next one frees are known from here on
    before = live_bytes()
    return before + max(accumulate(allocations(step)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("calls", [2, 4])
def test_calls_with_one_backward_need_one_set_of_gradients(
    way: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = _peak(way, calls)
    assert least <= _peak("eager", calls)
    monkeypatch.setattr(ObservedOwnership, "hand_over", lambda *_: None)
    gradients = sum(p.nbytes for p in _model().parameters())  # of the step before, which count in both
    assert _peak(way, calls) - gradients > (least - gradients) * 1.2


@pytest.mark.parametrize("way", WAYS)
def test_their_gradients_have_eagers_bits(way: str) -> None:
    assert all(map(torch.equal, _gradients(_pairs, way), _gradients(_pairs, "eager")))


def _penalised(model: Any, inputs: Sequence[torch.Tensor], original: nn.Module) -> Any:
    """Other nodes of autograd have gradients for the parameters: before, between and after those of the calls."""
    before = sum(p.square().sum() for p in original.parameters())
    first = model(inputs[0])
    between = sum((p * 3).sum() for p in original.parameters())
    second = model(inputs[1])
    after = sum(p.abs().sum() for p in original.parameters())
    return (first - second).square().mean() + before + between + after


def _frozen_once(model: Any, inputs: Sequence[torch.Tensor], original: nn.Module) -> Any:
    """A call in between has no gradient for one parameter."""
    first = model(inputs[0])
    weight = next(original.parameters())
    weight.requires_grad_(False)
    second = model(inputs[1])
    weight.requires_grad_(True)
    return (first - second).square().mean() + model(inputs[2]).square().mean()


def _nested(model: Any, inputs: Sequence[torch.Tensor], original: nn.Module) -> Any:
    """Another backward of other calls runs while gradients wait."""
    first, second = model(inputs[0]), model(inputs[1])

    def run(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            _pairs(model, inputs, original).backward()

    first.register_hook(run)
    return (first - second).square().mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", [_penalised, _frozen_once, _nested], ids=lambda loss: loss.__name__)
def test_losses_that_use_the_parameters_otherwise_have_eagers_bits(loss: Loss, way: str) -> None:
    assert all(map(torch.equal, _gradients(loss, way), _gradients(loss, "eager")))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_autograd_returns_have_eagers_bits(way: str) -> None:
    def found(way: str, chosen: slice) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model, inputs = _model(), _inputs(3)
        compiled = _compiled(model, way, inputs[0])
        asked = list(model.parameters())[chosen]
        _pairs(compiled, inputs, model).backward()
        returned = torch.autograd.grad(_pairs(compiled, inputs, model), asked)
        model.zero_grad()
        _pairs(compiled, inputs, model).backward(inputs=asked)
        return [*returned, *(p.grad for p in model.parameters() if p.grad is not None)]

    for chosen in (slice(None), slice(1, 3)):
        assert all(map(torch.equal, found(way, chosen), found("eager", chosen)))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_parameters_see_the_sum_once(way: str) -> None:
    def seen(way: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model, inputs, found = _model(), _inputs(3), list[torch.Tensor]()
        compiled = _compiled(model, way, inputs[0])
        for i, p in enumerate(model.parameters()):
            if i % 2:
                p.register_hook(lambda g: found.append(g.clone()))  # type: ignore[no-untyped-call]
            else:
                p.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone()))  # type: ignore[no-untyped-call]
        for _ in range(2):
            _pairs(compiled, inputs, model).backward()
        return found

    expected = seen("eager")
    found = seen(way)
    assert len(found) == len(expected) == 8
    assert all(any(torch.equal(f, e) for e in expected) for f in found)


@pytest.mark.parametrize("hooked", [0, 1])
def test_a_hook_on_the_node_of_a_call_may_replace_or_keep_what_it_hands_over(hooked: int) -> None:
    model, inputs = _model(), _inputs(2)
    compiled = memplan.compile(model, inputs[0])
    for _ in range(2):
        model.zero_grad()
        _pairs(compiled, inputs, model).backward()
    alone = []
    for x in inputs:
        one = copy.deepcopy(model)
        one.zero_grad()
        one(x).square().mean().backward()
        alone.append([p.grad for p in one.parameters() if p.grad is not None])

    def squares(hook: Callable[..., Any]) -> list[torch.Tensor]:
        model.zero_grad()
        results = [compiled(x) for x in inputs]
        node: Any = results[hooked].grad_fn
        while type(node).__name__ != "PlannedStepBackward":
            node = node.next_functions[0][0]
        node.register_hook(hook)
        sum(r.square().mean() for r in results).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    doubled = squares(lambda given, _: tuple(None if g is None else g * 2 for g in given))
    sums = [of_hooked * 2 + other for of_hooked, other in zip(alone[hooked], alone[1 - hooked], strict=True)]
    assert all(map(torch.equal, doubled, sums))

    kept: list[torch.Tensor] = []
    squares(lambda given, _: kept.extend(g for g in given if g is not None))
    assert len(kept) == len(alone[hooked])
    assert all(any(torch.equal(k, own) for own in alone[hooked]) for k in kept)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_kept_adds_as_eager_does(way: str) -> None:
    def found(way: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model, inputs = _model(), _inputs(2)
        compiled = _compiled(model, way, inputs[0])
        for _ in range(2):
            loss = _pairs(compiled, inputs, model)
            loss.backward(retain_graph=True)
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, found(way), found("eager")))


def test_anomaly_mode_leaves_the_sum_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    targets = autograd_step._targets

    def seen(*args: Any) -> Any:
        taken.append((found := targets(*args)) is not None)
        return found

    monkeypatch.setattr(autograd_step, "_targets", seen)
    expected = _gradients(_pairs, "eager", steps=2)
    assert all(map(torch.equal, _gradients(_pairs, "compile", steps=2), expected))
    assert any(taken)
    taken.clear()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert all(map(torch.equal, _gradients(_pairs, "compile", steps=2), expected))
    assert not any(taken)


def test_gradients_wait_for_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    handed, p, gradient = HandedGradients(), torch.zeros(2), torch.ones(2)
    tasks = iter([7, 7, 8, 9, 9, 9])
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: next(tasks))
    handed.note([p], [gradient])
    assert handed.waiting([p]) == [gradient]
    assert handed.waiting([p]) is None  # another backward runs
    handed.note([p], [gradient])
    assert handed.waiting([p, torch.zeros(2)]) is None
    del gradient
    assert handed.waiting([p]) is None  # autograd has dropped it


def test_gradients_on_an_accelerator_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    handed, p, gradient = HandedGradients(), torch.zeros(2), torch.ones(2)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)
    monkeypatch.setattr(handed_gradients, "is_accelerator", lambda device: True)
    handed.note([p], [gradient])
    assert handed.waiting([p]) is None
