"""Conjugates and negations that torch notes in a bit are computed: eager's numbers, in values and in gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.runtime import compile as memplan_compile
from memplan.runtime import compile_step
from tests.slow import slow

Op = Callable[[torch.Tensor, torch.Tensor], Any]
_COMPLEX = torch.complex64

OPS: dict[str, Op] = {
    "product": lambda x, w: (x * w).exp() * w,
    "matrices": lambda x, w: torch.tanh(x @ w) @ w.conj(),
    "conjugate": lambda x, w: (x * w).conj() * w,
    "adjoint": lambda x, w: (x * w).mH @ w,
    "imaginary": lambda x, w: (x * w).conj().imag * 2,
    "imaginary returned": lambda x, w: (x * w).conj().imag,
    "slices": lambda x, w: (x * w)[::2].conj() * w[::2],
    "expanded": lambda x, w: (x * w)[:1].conj().expand(4, 4) * w,
    "eigenvalues": lambda x, w: torch.linalg.eig(x * w)[0].abs() * w,
}


FAST = ("conjugate", "adjoint", "imaginary returned", "expanded")


class _Weighted(nn.Module):
    def __init__(self, op: Op, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.weight = nn.Parameter(torch.randn(*shape, dtype=_COMPLEX))

    def forward(self, x: torch.Tensor) -> Any:
        return self.op(x, self.weight)


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the parameter and of the input, for an incoming gradient that is conjugated."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    noise = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    y.backward(noise.conj())
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    assert x.grad is not None
    return [y.detach(), parameter.grad, x.grad]


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in OPS])
def test_values_and_gradients_are_eagers(name: str) -> None:
    net = _Weighted(OPS[name], 4, 4)
    eager = copy.deepcopy(net)
    compiled = memplan_compile(net, (torch.randn(4, 4, dtype=_COMPLEX, requires_grad=True),), sanitize="poison")
    for _ in range(2):
        x = torch.randn(4, 4, dtype=_COMPLEX)
        for ours, theirs in zip(_step(compiled, x), _step(eager, x), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs)


class _Filter(nn.Module):
    """Multiplies the spectrum by real parameters, several times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([torch.randn(65) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.fft.irfft(torch.fft.rfft(x) * weight * (1 + 2j)).tanh()
        return x.square().mean()


def test_a_step_in_the_frequency_domain_trains_as_eager() -> None:
    net, x = _Filter(), torch.randn(8, 128)
    eager = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(n.parameters(), lr=0.1, fused=True) for n in (net, eager))
    step = compile_step(net, ours, lambda loss: loss, (x,), sanitize="poison")
    for _ in range(3):
        theirs.zero_grad()
        loss = eager(x)
        loss.backward()
        theirs.step()
        assert torch.equal(step(x), loss.detach())
        x = torch.randn(8, 128)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), eager.parameters(), strict=True))


def test_what_is_conjugated_can_be_computed_again() -> None:
    net, x = _Filter(), torch.randn(8, 128)
    eager = copy.deepcopy(net)
    compiled = memplan_compile(net, (x,), arena_budget="min", policy="recompute", sanitize="poison")
    assert len(compiled.plan.evictions) > 0
    for model in (compiled, eager):
        model(x).backward()
    grads = [[p.grad for p in n.parameters()] for n in (net, eager)]
    assert all(p is not None and q is not None and torch.equal(p, q) for p, q in zip(*grads, strict=True))


def test_a_later_call_may_pass_a_conjugated_input() -> None:
    net = _Weighted(OPS["product"], 4, 4)
    eager = copy.deepcopy(net)
    compiled = memplan_compile(net, (torch.randn(4, 4, dtype=_COMPLEX, requires_grad=True),), sanitize="poison")
    x = torch.randn(4, 4, dtype=_COMPLEX)
    assert torch.equal(compiled(x.conj()), eager(x.conj()))
