"""Tests of the gradients of results that no loss uses, which are zeros that take no memory where that can be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

ROWS, WIDTH = 4, 96


class Turned(nn.Module):
    """Its first result has a gradient whose layout is another than that of what it is multiplied with."""

    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.turn = nn.Parameter(torch.rand(3, 4, 5, 6)), turn

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned, input_ = self.turn(self.weight), self.turn(x)
        return (turned + input_) * factor, turned + input_ * 2


_TURNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t * 1,
    "transposed": lambda t: t.transpose(1, 2),
    "permuted": lambda t: t.permute(3, 0, 2, 1),
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "one column": lambda t: t[..., :1],
}


@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("partner", ["contiguous", "channels last"])
@pytest.mark.parametrize("turn", _TURNS)
def test_a_result_that_no_loss_uses_may_have_any_layout(turn: str, partner: str, way: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Turned(_TURNS[turn]), torch.rand(3, 4, 5, 6)
    shape = model.turn(x).shape
    factor, weights = torch.rand(shape), torch.rand(shape)
    if partner == "channels last":
        factor = factor.contiguous(memory_format=torch.channels_last)
    eager = copy.deepcopy(model)
    compiled: Any = memplan.compile(model, (x.clone().requires_grad_(), factor)) if way == "compile" else None
    compiled = compiled or torch.compile(model, backend=memplan.Backend())
    for step in range(3):
        given = [x.clone().requires_grad_() for _ in range(2)]
        for one, own in zip((eager, compiled), given, strict=True):
            one.zero_grad()
            results = one(own, factor)
            (results[step == 2] * weights).sum().backward()
        expected, found = [
            [t.grad for t in own if t.grad is not None] for own in ((eager.weight, given[0]), (model.weight, given[1]))
        ]
        assert len(found) == len(expected) == 2
        assert all(map(torch.equal, found, expected))
