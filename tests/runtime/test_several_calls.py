"""Several calls of a compiled module that wait for their backward: eager's bits, in one arena."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime import CompiledModule, compile

Step = Callable[[Any, torch.nn.Module, int], torch.Tensor]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))


def _x(seed: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def _train(step: Callable[[Any, int], torch.Tensor], *, steps: int = 5, **options: Any) -> CompiledModule:
    """Train a copy with eager and a compiled one with the same steps; losses, gradients and parameters are the same."""
    options.setdefault("sanitize", "poison")
    eager = _net()
    net = copy.deepcopy(eager)
    compiled = compile(net, _x(0), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (eager, net)]
    for n in range(steps):
        losses = []
        for call, optimizer in ((eager, optimizers[0]), (compiled, optimizers[1])):
            torch.manual_seed(n)
            losses.append(step(call, n))
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(n % 2))
        assert torch.equal(*losses)
        for p, q in zip(eager.parameters(), net.parameters(), strict=True):
            assert torch.equal(p, q)
    return compiled


def _siamese(call: Any, n: int) -> torch.Tensor:
    loss = (call(_x(n)) - call(_x(n + 100))).square().mean()
    loss.backward()
    return loss.detach()


def _contrastive(call: Any, n: int) -> torch.Tensor:
    one, two, three = (call(_x(n + k)) for k in range(3))
    loss = (one * two).mean() - (one * three).mean()
    loss.backward()
    return loss.detach()


def _first_backward_first(call: Any, n: int) -> torch.Tensor:
    one, two = call(_x(n)).square().sum(), call(_x(n + 1)).square().sum()
    if n % 2:
        two.backward()
        one.backward()
    else:
        one.backward()
        two.backward()
    return (one + two).detach()


def _acting(call: Any, n: int) -> torch.Tensor:
    waiting = call(_x(n)).square().sum()
    with torch.no_grad():
        target = call(_x(n + 1)) + call(_x(n + 2))
    loss = waiting + (call(_x(n + 3)) - target).square().sum()
    loss.backward()
    return loss.detach()


def _rollout(call: Any, n: int) -> torch.Tensor:
    rewards = [call(_x(n + k, 16)).square().mean() for k in range(2 + n % 3)]
    loss = torch.stack(rewards).sum()
    loss.backward()
    return loss.detach()


def _other_batches(call: Any, n: int) -> torch.Tensor:
    one, two = call(_x(n)).square().sum(), call(_x(n + 1, 5 + n % 2)).square().sum()
    loss = one + two
    loss.backward()
    return loss.detach()


STEPS = [_siamese, _contrastive, _first_backward_first, _acting, _rollout, _other_batches]


@pytest.mark.parametrize("gradients", ["auto", "safe", "owned"])
@pytest.mark.parametrize("step", STEPS)
def test_calls_in_flight_train_as_eager(step: Callable[[Any, int], torch.Tensor], gradients: Any) -> None:
    _train(step, gradients=gradients)
