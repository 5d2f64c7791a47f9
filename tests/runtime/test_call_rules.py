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
from tests.slow import slow


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def test_planning_anew_between_forward_and_backward_leaves_the_activations_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    eager, x = copy.deepcopy(model), torch.randn(64, 4)
    compiled = memplan.compile(model, x, on_mismatch="replan")
    y = compiled(x)
    compiled(torch.randn(48, 4))  # which would fit in the same arena
    y.square().sum().backward()
    eager(x).square().sum().backward()
    assert all(torch.equal(_grad(p), _grad(q)) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class Sums(nn.Module):
    """Two parameters whose gradients are one tensor, as AOTAutograd hands them out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b).sin()


@pytest.mark.parametrize("gradients", ["outside", slow("arena")])
def test_two_gradients_have_bytes_of_their_own(gradients: Gradients) -> None:
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    for net, call in ((model, memplan.compile(model, x, gradients=gradients)), (eager, eager)):
        call(x).sum().backward()
        _grad(net.a).mul_(3)
    assert torch.equal(_grad(model.b), _grad(eager.b))
    assert _grad(model.a).untyped_storage().data_ptr() != _grad(model.b).untyped_storage().data_ptr()


class Window(nn.Module):
    """A view of its input, and a result of its own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[1:3], x * 2


def test_views_of_inputs_that_are_slices() -> None:
    big = torch.arange(40.0).view(10, 4)
    compiled = memplan.compile(Window(), big[2:7], train=False)
    for start in (2, 0, 5):
        x = big[start : start + 5]
        view, twice = compiled(x)
        assert torch.equal(view, x[1:3])
        assert view.data_ptr() == x[1].data_ptr()
        assert torch.equal(twice, x * 2)


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


class Counts(nn.Module):
    """Adds its input to a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return x * self.scale


@pytest.mark.parametrize("train", [False, True])
def test_autograd_knows_of_buffers_that_a_call_has_changed(train: bool) -> None:
    model = Counts()
    compiled = memplan.compile(model, torch.ones(4), train=train)
    product = torch.ones(4, requires_grad=True) * model.total
    compiled(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(product.sum())
