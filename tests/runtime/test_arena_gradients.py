"""`gradients="arena"`: eager's gradients in fewer bytes; moved out, or an error, where a step would overwrite them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

import memplan
from memplan.errors import MemplanError, StaleActivationsError, UnsupportedCall
from memplan.runtime import CompiledModule, compile
from tests.models import shared_or_nano
from tests.slow import slow


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def _compiled(net: nn.Module) -> tuple[CompiledModule, torch.Tensor]:
    x = torch.randn(16, 8)
    return compile(net, x, gradients="arena", sanitize="poison"), x


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _within(compiled: CompiledModule, tensor: torch.Tensor) -> bool:
    memory = compiled._calls.selector.main.arena.memory
    return bool(memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.numel())


@pytest.mark.parametrize("name", [slow("mlp"), "shared", slow("gpt2"), slow("vit"), "resnet", slow("t5")])
def test_same_gradients_as_when_they_are_handed_out(name: str) -> None:
    model, inputs = shared_or_nano(name)
    other = copy.deepcopy(model)
    resident, safe = (
        compile(model, inputs, gradients="arena", sanitize="poison"),
        compile(other, inputs, gradients="safe"),
    )
    for step in range(3):
        losses = []
        for one, call in ((model, resident), (other, safe)):
            if step != 1:  # the second step adds to the gradients of the first
                one.zero_grad()
            torch.manual_seed(step)
            losses.append(call(*inputs))
            losses[-1].backward()
        assert torch.equal(*losses)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert torch.equal(p.grad, _grad(q))
                assert p.grad.stride() == _grad(q).stride()


def test_an_optimizer_trains_as_with_eager() -> None:
    net = _net()
    eager = copy.deepcopy(net)
    compiled, x = _compiled(net)
    pairs = [(m, torch.optim.AdamW(o.parameters(), lr=0.01)) for m, o in ((compiled, net), (eager, eager))]
    for _ in range(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            optimizer.step()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_gradients_lie_in_the_arena_and_the_plan_counts_them_there() -> None:
    net = _net()
    compiled, x = _compiled(net)
    compiled(x).sum().backward()
    assert all(p.grad is not None and _within(compiled, p.grad) for p in net.parameters())
    safe = memplan.plan(net, x, gradients="safe")
    assert safe.outside["gradients"] == sum(p.numel() * 4 for p in net.parameters())
    assert compiled.plan.outside["gradients"] == 0
    assert compiled.plan.total < safe.total


@pytest.mark.parametrize(
    "name", ["shared", slow("gpt2"), slow("vit"), slow("convnext"), "resnet", slow("unet"), slow("lstm")]
)
def test_never_more_bytes_in_all_than_outside(name: str) -> None:
    model, inputs = shared_or_nano(name)
    assert memplan.plan(model, inputs, gradients="arena").max_live <= _all_outside(
        memplan.plan(model, inputs, gradients="safe")
    )


def _all_outside(plan: memplan.Plan) -> int:
    return plan.max_live + plan.outside["gradients"]


def test_a_gradient_that_is_kept_moves_out_and_stays_the_same_tensor() -> None:
    net = _net()
    compiled, x = _compiled(net)
    compiled(x).sum().backward()
    kept = [p.grad for p in net.parameters()]
    values = [g.clone() for g in kept if g is not None]
    loss = compiled(x).square().sum()  # the gradients move out
    for p, g, value in zip(net.parameters(), kept, values, strict=True):
        assert p.grad is g
        assert not _within(compiled, _grad(p))
        assert torch.equal(_grad(p), value)
    loss.backward()  # and are added to
    added = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for p, value, g in zip(net.parameters(), values, added, strict=True):
        torch.testing.assert_close(p.grad, value + g)


def test_wrappers_of_torch_func_that_are_alive_are_no_gradients() -> None:
    wrappers: list[torch.Tensor] = []

    def sum_of(x: torch.Tensor) -> torch.Tensor:
        wrappers.append(x)
        return x.sum()

    torch.func.grad(sum_of)(torch.ones(2))
    assert wrappers
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    compiled = memplan.compile(model, x)
    compiled(x).sum().backward()
    kept = [model.weight.grad]
    model.zero_grad()
    compiled(2 * x).sum().backward()
    assert torch.equal(kept[0], x.expand(2, 3))  # type: ignore[arg-type]
    assert torch.equal(model.weight.grad, 2 * x.expand(2, 3))  # type: ignore[arg-type]


def test_zeroed_gradients_move_out_once() -> None:
    net = _net()
    compiled, x = _compiled(net)
    for _ in range(3):
        net.zero_grad(set_to_none=False)
        compiled(x).sum().backward()
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    for p, g in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_other_programs_of_the_arena_move_them_out_too() -> None:
    net = _net()
    compiled, x = _compiled(net)
    compiled(x).sum().backward()
    values = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    with torch.no_grad():
        compiled(x)
    compiled.eval()
    compiled(x)
    for p, value in zip(net.parameters(), values, strict=True):
        assert torch.equal(_grad(p), value)


def test_a_storage_or_an_exchanged_tensor_that_is_kept_is_an_error() -> None:
    net = _net()
    compiled, x = _compiled(net)
    holders: list[Any] = [torch.Tensor.untyped_storage, from_dlpack, torch.Tensor.numpy]
    for hold in holders:
        net.zero_grad()
        compiled(x).sum().backward()
        kept = hold(_grad(next(net.parameters())))
        with pytest.raises(StaleActivationsError, match=r"0\.weight"):
            compiled(x)
        del kept
        compiled(x)


def test_after_a_hook_has_raised_training_goes_on() -> None:
    net = _net()
    compiled, x = _compiled(net)

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


def test_what_moves_out_under_inference_mode_stays_an_ordinary_tensor() -> None:
    net = _net()
    compiled, x = _compiled(net)
    with torch.inference_mode():
        compiled(x)
    compiled(x).sum().backward()
    with torch.inference_mode():
        compiled(x)
    for parameter in net.parameters():
        assert not _within(compiled, _grad(parameter))
        assert not _grad(parameter).is_inference()


def test_a_gradient_that_is_its_own_view_moves_out() -> None:
    net = _net()
    compiled, x = _compiled(net)
    compiled(x).sum().backward()
    parameter = next(net.parameters())
    value = _grad(parameter).clone()
    parameter.grad = _grad(parameter).view_as(parameter)
    compiled(x)
    assert torch.equal(_grad(parameter), value)


@pytest.mark.parametrize("how", ["view", "autograd.grad", "another name"])
def test_whatever_else_refers_to_a_gradient_is_an_error_instead_of_wrong(how: str) -> None:
    net = _net()
    compiled, x = _compiled(net)
    loss = compiled(x).sum()
    first = next(net.parameters())
    if how == "autograd.grad":
        kept = torch.autograd.grad(loss, first)[0]
    else:
        loss.backward()
        assert first.grad is not None
        kept = first.grad.view(-1) if how == "view" else first.grad
        if how == "another name":
            net.zero_grad()
    value = kept.clone()
    for _ in range(2):  # it stays an error
        with pytest.raises(StaleActivationsError, match=r"0\.weight.*still referred to"):
            compiled(x)
    assert torch.equal(kept, value)
    del kept
    compiled(x).sum().backward()


def test_gradients_outlive_the_module() -> None:
    net = _net()
    compiled, x = _compiled(net)
    compiled(x).sum().backward()
    memory = weakref.ref(compiled._calls.selector.main.arena.memory)
    wanted = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    del compiled
    gc.collect()
    for p, g in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, g)
    net.zero_grad()
    gc.collect()
    assert memory() is None


def test_hooks_on_parameters_see_them() -> None:
    net = _net()
    seen: list[int] = []
    parameter = next(net.parameters())
    hooked: Any = parameter
    hooked.register_post_accumulate_grad_hook(lambda p: seen.append(p.numel()))
    hooked.register_hook(lambda g: g * 2)
    compiled, x = _compiled(net)
    wanted = torch.autograd.grad(net(x).sum(), parameter)[0]  # doubled by the hook, too
    compiled(x).sum().backward()
    assert seen == [parameter.numel()]
    torch.testing.assert_close(parameter.grad, wanted)


def test_a_saved_plan_is_for_the_same_choice() -> None:
    net, x = _net(), torch.randn(16, 8)
    plan = memplan.plan(net, x, gradients="arena")
    compile(net, x, gradients="arena", plan=plan)(x).sum().backward()
    compile(net, x, plan=plan)(x).sum().backward()
    compile(net, x, plan=memplan.plan(net, x, gradients="safe"))(x).sum().backward()
    with pytest.raises(MemplanError, match="another graph"):
        compile(net, x, gradients="safe", plan=plan)


@pytest.mark.parametrize("option", [{"device": "cpu"}, {"cuda_graph": True}])
def test_what_does_not_go_with_it_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCall, match=r"gradients=.arena. is not supported with it"):
        compile(_net(), torch.randn(16, 8), gradients="arena", **option)
