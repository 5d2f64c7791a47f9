"""A model of many graphs is compared with eager once: a plan that cannot improve is not made again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.planning import make_plan as planning
from memplan.planning import outside_arena, room_together


class Block(nn.Module):
    """A block that dynamo breaks twice, into a graph with parameters and two of views alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = x + self.inner(x)
        if h.sum() > -1e9:
            h = h.flatten(1)
        if h.sum() > -1e9:
            h = h.view(x.shape)
        return h


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("through", ["compile", "backend"])
@pytest.mark.parametrize("case", [(_linear, (8, 64)), (_linear, (128, 64)), (_convolution, (8, 4, 16, 16))])
def test_later_steps_plan_nothing(
    case: tuple[Callable[[], nn.Module], tuple[int, ...]],
    through: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "memplan")
    made, (make, shape) = [0], case
    original = planning.make_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        made[0] += 1
        return original(*args, **kwargs)

    for module in (planning, outside_arena, room_together):
        monkeypatch.setattr(module, "make_plan", counted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(make()) for _ in range(4))), torch.randn(shape)
    called: Any = memplan.compile(model, x) if through == "compile" else torch.compile(model, backend="memplan")
    update, counts = optimizer(model.parameters(), lr=1e-3), list[int]()
    for step in range(6):
        before = made[0]
        if step == 2:
            assert "of 0 B instead of 0 B" not in caplog.text
            caplog.clear()
        update.zero_grad()
        called(x).square().mean().backward()
        update.step()
        counts.append(made[0] - before)
    assert counts[0] > 0
    assert counts[2:] == [0] * 4
    assert not [r.message for r in caplog.records if "planned again" in r.message]
