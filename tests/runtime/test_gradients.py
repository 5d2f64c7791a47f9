"""Gradients in the arena and outside of it: they have eager's bits, whatever a program does with them between steps."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import memplan
from memplan.devices.measure import peak_bytes
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime import CompiledModule, compile
from memplan.runtime.execute.gradients import AddedGradients
from tests.steps import gradients_of

WAYS = ("arena", "outside")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))


def _assert_same(ours: nn.Module, eager: nn.Module) -> None:
    """Assert that the same parameters have a gradient, and the same one."""
    one, two = gradients_of(ours), gradients_of(eager)
    assert one.keys() == two.keys()
    assert all(torch.equal(gradient, two[name]) for name, gradient in one.items())


def _bytes(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


class Pair:
    """A compiled model and eager's copy of it, which do the same things."""

    def __init__(self, gradients: Any, **options: Any) -> None:
        self.ours = _net()
        self.eager = copy.deepcopy(self.ours)
        self.x = torch.randn(8, 16)
        self.compiled = compile(self.ours, self.x, gradients=gradients, sanitize="poison", **options)

    def both(self, do: Callable[[nn.Module, Callable[[Tensor], Any], Tensor], object]) -> None:
        """Do something with both, and require the same gradients afterwards."""
        do(self.ours, self.compiled, self.x)
        do(self.eager, self.eager, self.x)
        _assert_same(self.ours, self.eager)


def _step(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    call(x).square().mean().backward()


def _regularized(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    (call(x).square().mean() + sum(p.norm() for p in net.parameters())).backward()


def _zeroed_late(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    loss = call(x).square().mean()
    net.zero_grad()
    loss.backward()


def _zeros(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    net.zero_grad(set_to_none=False)
    call(x).square().mean().backward()


def _one_missing(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    next(net.parameters()).grad = None
    call(x).square().mean().backward()


def _for_one(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    call(x).square().mean().backward(inputs=[next(net.parameters())])


def _apart(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    found = torch.autograd.grad(call(x).sum(), list(net.parameters()))
    for p, g in zip(net.parameters(), found, strict=True):
        p.grad = g if p.grad is None else p.grad + g


def _double(parameter: Tensor) -> None:
    _grad(parameter).mul_(2)


def _hooked(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    parameter: Any = next(net.parameters())
    handles = (parameter.register_hook(lambda g: g * 3), parameter.register_post_accumulate_grad_hook(_double))
    call(x).square().mean().backward()
    for handle in handles:
        handle.remove()


def _other_layout(net: nn.Module, call: Callable[[Tensor], Any], x: Tensor) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p.t()).t() if p.dim() == 2 else torch.ones_like(p)
    call(x).square().mean().backward()


DOINGS = (_step, _regularized, _zeroed_late, _zeros, _one_missing, _for_one, _apart, _hooked, _other_layout)


@pytest.mark.parametrize("gradients", WAYS)
def test_what_is_done_between_accumulating_steps(gradients: str) -> None:
    """Whatever a training loop does, gradients that accumulate have eager's bits."""
    pair = Pair(gradients)
    for do in DOINGS:
        for what in (_step, _step, do, _step, do, do, _step):
            pair.both(what)
        pair.ours.zero_grad()
        pair.eager.zero_grad()
        for what in (_step, do, _step):
            pair.both(what)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _within(compiled: CompiledModule, tensor: Tensor) -> bool:
    memory = compiled._calls.arena.memory
    return bool(memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.numel())


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what memplan logged."""
    return [r.message for r in caplog.records if r.name == "memplan"]


def test_gradients_lie_in_the_arena_and_the_plan_counts_them_there() -> None:
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    compiled(x).sum().backward()
    assert all(_within(compiled, _grad(p)) for p in net.parameters())
    outside = memplan.plan(net, x, gradients="outside")
    assert outside.outside["gradients"] == _bytes(net)
    assert compiled.plan.outside["gradients"] == 0
    assert compiled.plan.total < outside.total


def test_what_is_still_set_moves_out_once_and_plans_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The tensors stay the same objects, and the model stays as it was compiled."""
    pair = Pair("arena")
    plan, made = pair.compiled.plan, pair.compiled._calls.programs.main
    with torch.no_grad():
        pair.compiled(pair.x)  # the program without gradients is said to be made
    with caplog.at_level(logging.INFO, logger="memplan"):
        pair.both(_step)
        kept = [_grad(p) for p in pair.ours.parameters()]
        for _ in range(3):
            pair.both(_step)
            with torch.no_grad():
                assert torch.equal(pair.compiled(pair.x), pair.eager(pair.x))
    assert all(p.grad is g and not _within(pair.compiled, g) for p, g in zip(pair.ours.parameters(), kept, strict=True))
    assert pair.compiled.plan is plan
    assert pair.compiled._calls.programs.main is made
    assert not _said(caplog)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda g: g.view(-1),
    "an array": torch.Tensor.numpy,
    "a storage": torch.Tensor.untyped_storage,
    "DLPack": from_dlpack,
}


@pytest.mark.parametrize("sanitize", [None, "poison", "redzone"])
@pytest.mark.parametrize("name", HOLDS)
def test_what_else_has_a_gradient_keeps_it(name: str, sanitize: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The block stays with what refers to it, the step takes another one, and later gradients are copied out."""
    net, x = _net(), torch.randn(8, 16)
    eager = copy.deepcopy(net)
    compiled = compile(net, x, sanitize=sanitize)
    found: list[list[Tensor]] = []
    with caplog.at_level(logging.WARNING, logger="memplan"):
        for model, call in ((net, compiled), (eager, eager)):
            kept = []
            for step in range(3):
                call(x * (step + 1)).square().sum().backward()
                kept.append(HOLDS[name](_grad(next(model.parameters()))))
                model.zero_grad()
            call(x).sum().backward()
            numbers = (torch.tensor(k, dtype=torch.uint8) if name == "a storage" else torch.as_tensor(k) for k in kept)
            found.append([*(n.clone() for n in numbers), *(_grad(p).clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
    assert sum("still refers to the gradient of '0.weight'" in message for message in _said(caplog)) == 1
    runner = compiled._calls.programs.main
    assert runner.rebound == 1


def test_gradients_outlive_the_module() -> None:
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x)
    compiled(x).sum().backward()
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    del compiled
    gc.collect()
    assert all(torch.equal(_grad(p), g) for p, g in zip(net.parameters(), wanted, strict=True))


def test_an_address_under_a_budget_raises() -> None:
    """Two arenas would break the budget."""
    net, x = _net(), torch.randn(64, 16)
    compiled = compile(net, x, budget=memplan.plan(net, x).total + 2 * _bytes(net))
    compiled(x).sum().backward()
    kept = _grad(next(net.parameters())).numpy()
    net.zero_grad()
    with pytest.raises(StaleActivationsError, match=r"the gradient of '0.weight' is still referred to"):
        compiled(x)
    del kept
    compiled(x).sum().backward()


def test_gradients_still_set_under_a_budget() -> None:
    """Where a budget has no room for gradients beside the arena, the call raises, and changes nothing."""
    net, x = _net(), torch.randn(64, 16)
    least = memplan.plan(net, x, budget="min").total
    compiled = compile(net, x, budget=least + 512)
    compiled(x).sum().backward()
    before = [_grad(p).clone() for p in net.parameters()]
    with pytest.raises(BudgetInfeasible, match="gradients of the last step") as raised:
        compiled(x)
    assert raised.value.smallest == compiled.plan.total + _bytes(net)
    assert all(torch.equal(_grad(p), g) for p, g in zip(net.parameters(), before, strict=True))
    net.zero_grad()
    compiled(x).sum().backward()
    assert all(torch.equal(_grad(p), g) for p, g in zip(net.parameters(), before, strict=True))


def test_after_a_hook_has_raised_training_goes_on() -> None:
    net, x = _net(), torch.randn(8, 16)
    compiled = compile(net, x, sanitize="poison")

    def finite(gradient: torch.Tensor) -> None:
        if not torch.isfinite(gradient).all():
            raise FloatingPointError

    hooked: Any = list(net.parameters())
    for parameter in hooked:
        parameter.register_hook(finite)
    outcomes = []
    for batch in (x, x * float("inf"), x, x):
        net.zero_grad()
        try:
            compiled(batch).square().mean().backward()
            outcomes.append("step")
        except FloatingPointError:
            outcomes.append("skipped")
    assert outcomes == ["step", "skipped", "step", "step"]


def _peak(compiled: CompiledModule, x: Tensor) -> int:
    """Return the bytes that an accumulating step allocates beside its arena."""
    return peak_bytes([lambda: compiled(x).square().mean().backward()], x.device)[0]


def test_no_second_set_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that adds needs room for one gradient at a time; one that returns them allocates all of them."""
    found = []
    for _ in range(2):
        net, x = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), torch.randn(4, 128)
        compiled = compile(net, x, gradients="outside")
        for _ in range(2):
            compiled(x).square().mean().backward()
        found.append(_peak(compiled, x))
        monkeypatch.setattr(AddedGradients, "targets", lambda *_: None)
    assert found[1] - found[0] > 2 * 128 * 128 * 4
