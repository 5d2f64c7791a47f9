"""Rules that keep a call from being silently wrong, each by a call that only this rule catches."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.choices import Gradients
from tests.models import Made
from tests.slow import slow


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def _sums() -> Made:
    """Two parameters whose gradients are one tensor, as AOTAutograd hands them out."""
    a, b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    return Made(lambda m, x: (x + m.a + m.b).sin(), a=a, b=b)


@pytest.mark.parametrize("gradients", ["outside", slow("arena")])
def test_two_gradients_have_bytes_of_their_own(gradients: Gradients) -> None:
    torch.manual_seed(0)
    model, x = _sums(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    for net, call in ((model, memplan.compile(model, x, gradients=gradients)), (eager, eager)):
        call(x).sum().backward()
        _grad(net.a).mul_(3)
    assert torch.equal(_grad(model.b), _grad(eager.b))
    assert _grad(model.a).untyped_storage().data_ptr() != _grad(model.b).untyped_storage().data_ptr()


def test_an_output_that_the_backward_needs_does_not_keep_its_step_alive() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    compiled = memplan.compile(model, x)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y: Any = compiled(x)
            assert compiled._calls.arena.ownership.pending is not None
            del y
            assert compiled._calls.arena.ownership.pending is None
    finally:
        gc.enable()
