"""Under autocast with dropout, bit by bit as in eager, which leaves autocast before its backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.zoo import ZOO
from memplan.runtime import compile as memplan_compile
from tests.slow import slow
from tests.steps import outcomes_of, same_outcomes, under_autocast


@pytest.mark.parametrize("name", ["mlp", slow("gpt2"), slow("lstm")])
def test_the_zoo_is_eagers_bits(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]("nano")
    eager = copy.deepcopy(model.train())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = memplan_compile(model, inputs)
    expected = outcomes_of(eager, under_autocast(eager), *inputs, steps=3, seed=1)
    assert same_outcomes(outcomes_of(model, under_autocast(compiled), *inputs, steps=3, seed=1), expected)


@pytest.mark.parametrize("p", [0.1, 0.77])
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
