"""`backward(retain_graph=True)`: the next backward of a step runs its forward again, with eager's bits, or raises."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.errors import StaleActivationsError
from memplan.runtime import compile
from tests.models import Made
from tests.runtime.reference import same_gradients
from tests.slow import slow


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.4), nn.Linear(16, 4))
    return nn.Sequential(*layers)


def _twice(call: Any, x: torch.Tensor) -> None:
    loss = call(x.flatten(1)).square().sum()  # nothing else refers to the input
    loss.backward(retain_graph=True)
    torch.randn(3)
    (2 * loss).backward(retain_graph=True)
    loss.backward()


def _two_losses(call: Any, x: torch.Tensor) -> None:
    out = call(x)
    out.square().sum().backward(retain_graph=True)
    out.sin().sum().backward()


def _gradients_first(call: Any, x: torch.Tensor) -> None:
    out = call(x)
    found = torch.autograd.grad(out.sum(), list(call.parameters()), retain_graph=True)
    kept = [g.clone() for g in found]
    (out.square().sum() + sum(g.sum() for g in found)).backward()
    assert all(map(torch.equal, found, kept))


def _beside_another(call: Any, x: torch.Tensor) -> None:
    one, two = call(x).sin().sum(), call(x + 1).square().sum()
    two.backward(retain_graph=True)
    one.backward()
    two.backward()


@pytest.mark.parametrize(
    ("step", "gradients"),
    [
        (_twice, "arena"),
        slow(_twice, "outside"),
        slow(_two_losses, "arena"),
        (_two_losses, "outside"),
        (_gradients_first, "arena"),
        (_beside_another, "outside"),
    ],
)
def test_as_eager(step: Callable[[Any, torch.Tensor], None], gradients: Any) -> None:
    eager = _net()
    net = copy.deepcopy(eager)
    compiled = compile(net, torch.randn(6, 8), gradients=gradients, sanitize="poison")
    for n in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(n))
        for call in (eager, compiled):
            torch.manual_seed(n)
            step(call, x)
        drawn = torch.randn(3)
        torch.manual_seed(n)
        step(copy.deepcopy(eager), x)
        assert torch.equal(drawn, torch.randn(3)), "the generator goes on as after one forward"
        assert same_gradients(eager, net)
        for b, c in zip(eager.buffers(), net.buffers(), strict=True):
            assert torch.equal(b, c), "statistics count the forward once"
        eager.zero_grad()
        net.zero_grad()


def _decays() -> nn.Module:
    """Computes with a buffer that it changes."""
    return Made(lambda m, x: (m.layer(x) * m.scale.mul_(0.5)).tanh(), layer=nn.Linear(4, 4), scale=torch.ones(()))


def _changed_parameter(net: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        next(iter(net.parameters())).add_(1)


def _changed_input(net: nn.Module, x: torch.Tensor) -> None:
    x.zero_()


def _replaced(net: nn.Module, x: torch.Tensor) -> None:
    layer = next(net.children())
    assert isinstance(layer, nn.Linear)
    layer.bias.data = layer.bias.data.clone()


@pytest.mark.parametrize(
    ("net", "change", "why"),
    [
        (_net, _changed_parameter, "changed in place"),
        (_net, _changed_input, "changed in place"),
        (_net, _replaced, "a parameter or buffer was replaced"),
        (_decays, lambda net, x: None, "depend on the values that a buffer had"),
    ],
)
def test_what_cannot_run_again_says_why(net: Any, change: Callable[..., None], why: str) -> None:
    model = net()
    x = torch.randn(6, 8) if net is _net else torch.randn(6, 4)
    loss = compile(model, x)(x).sum()
    loss.backward(retain_graph=True)
    change(model, x)
    with pytest.raises(StaleActivationsError, match=why):
        loss.backward()


def test_a_backward_that_keeps_nothing_is_the_last() -> None:
    model, x = _net(), torch.randn(6, 8)
    loss = compile(model, x)(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(StaleActivationsError, match="backward ran twice for forward 1"):
        loss.backward()
