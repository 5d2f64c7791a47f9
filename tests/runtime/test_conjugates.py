"""Conjugates and negations that torch notes in a bit are computed: eager's numbers, in values and in gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.runtime import compile as memplan_compile
from tests.models import Made
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
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=_COMPLEX))
    net = Made(lambda m, x: OPS[name](x, m.weight), weight=weight)
    eager = copy.deepcopy(net)
    compiled = memplan_compile(net, (torch.randn(4, 4, dtype=_COMPLEX, requires_grad=True),), sanitize="poison")
    for _ in range(2):
        x = torch.randn(4, 4, dtype=_COMPLEX)
        for ours, theirs in zip(_step(compiled, x), _step(eager, x), strict=True):
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs)
