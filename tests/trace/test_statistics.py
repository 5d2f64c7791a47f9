"""Mixed precision on the CPU: normalisations keep float32 statistics, whatever their fakes say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.runtime import compile as memplan_compile


class Updating(nn.BatchNorm2d):
    """Batch norm by the op that keeps a reserve for its backward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        given = (input, self.weight, self.bias, self.running_mean, self.running_var)
        out: torch.Tensor = torch.ops.aten._batch_norm_with_update(*given, 0.1, 1e-5)[0]
        return out


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(5),
    "layer, half": lambda: nn.LayerNorm(5).bfloat16(),
    "layer, plain": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm2d(8),
    "batch, eval": lambda: nn.BatchNorm2d(8).eval(),
    "batch, with update": lambda: Updating(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
}


def _step(model: nn.Module, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        out = call(x)
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("name", _LAYERS)
def test_under_autocast_the_bits_are_those_of_eager(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), _LAYERS[name](), nn.Conv2d(8, 8, 1))
    eager, x = copy.deepcopy(model), torch.randn(4, 3, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = memplan_compile(model, x)
    ours, theirs = _step(model, compiled, x), _step(eager, eager, x)
    assert len(ours) == len(theirs) > len(list(model.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
