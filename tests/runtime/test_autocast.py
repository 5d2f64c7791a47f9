"""Under autocast with dropout, bit by bit as in eager, which leaves autocast before its backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO
from memplan.runtime import compile as memplan_compile


def _steps(model: nn.Module, call: Any, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(*inputs)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("name", ["mlp", "gpt2", "swin", "lstm"])
def test_the_zoo_is_eagers_bits(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]("nano")
    eager = copy.deepcopy(model.train())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = memplan_compile(model, inputs)
    pairs = zip(_steps(eager, eager, inputs), _steps(model, compiled, inputs), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.77])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dropout_of_any_type_is_eagers_bits(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Hardtanh(), nn.Dropout(p), nn.Hardtanh())
    found, incoming = [], torch.linspace(-1, 1, 1024, dtype=torch.float64).view(32, 32).to(dtype)
    for call in (model, None):
        x = torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
        run = memplan_compile(model, x) if call is None else call
        torch.manual_seed(1)
        out = run(x)
        (gradient,) = torch.autograd.grad(out, x, incoming)
        found.append((out.detach(), gradient))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
