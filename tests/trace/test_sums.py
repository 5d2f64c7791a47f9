"""Gradients that are sums: they are added in eager's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan
from memplan.core.choices import Gradients
from tests.models import Made, Shared
from tests.slow import slow

OUTSIDE_AND_IN: tuple[Gradients, ...] = ("outside", "arena")


def _eager(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("gradients", OUTSIDE_AND_IN)
@pytest.mark.parametrize("times", [1, slow(2), 4])
def test_shared_weights(times: int, gradients: Gradients) -> None:
    """Every sum has eager's bits; one buffer holds the gradient of each parameter."""
    torch.manual_seed(0)
    model, tokens = Shared(times), torch.randint(50, (12,))
    expected = _eager(model, tokens)
    model.zero_grad()
    compiled = memplan.compile(model, tokens, gradients=gradients)
    for _ in range(2):
        compiled(tokens).backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, gradient)
            p.grad = None
    outside = compiled.plan.outside["gradients"]
    assert outside == (0 if gradients == "arena" else sum(p.numel() * 4 for p in model.parameters()))


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a tensor and its transpose": lambda w, x: ((w + w.t()) * x).sum(),
    "the same gradient for two": lambda w, x: (w + x).tanh().sum(),
    "a term is read again": lambda w, x: (w.tanh() * w.tanh().detach() + w * x).sum() + (w * w).sum(),
    "pieces": lambda w, x: (w[:3] * x[:3]).sum() + (w[2:] * x[2:]).sum(),
    "expanded": lambda w, x: w.sum() + (w.sum() * x).sum(),
    "another dtype": lambda w, x: (w.double() * x).sum().float() + (w * x).sum(),
    "complex": lambda w, x: (torch.complex(w, x) * torch.complex(x, w)).abs().sum() + (w * w).sum(),
    "another layout": lambda w, x: (w.t().contiguous() * x).sum() + (w @ x).sum() + (x @ w).t().tanh().sum(),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradients", OUTSIDE_AND_IN)
def test_small_sums(name: str, gradients: Gradients) -> None:
    """Sums of unusual terms have eager's bits, for parameters and inputs."""

    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(5, 5)) for _ in range(2))
    model: Any = Made(lambda m, x: CASES[name](m.w, x) + CASES[name](m.v, m.w), w=w, v=v)
    x = torch.randn(5, 5, requires_grad=True)
    expected = [*_eager(model, x), x.grad.clone() if x.grad is not None else None]
    model.zero_grad()
    x.grad = None
    memplan.compile(model, x, gradients=gradients, sanitize="poison")(x).backward()
    for found, gradient in zip([model.w.grad, model.v.grad, x.grad], expected, strict=True):
        assert found is not None
        assert gradient is not None
        assert torch.equal(found, gradient)
