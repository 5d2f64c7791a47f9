"""Each way of being silently wrong that prototypes showed (FINDINGS 5) is closed, or raises a typed error."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.choices import Gradients
from memplan.errors import StaleActivationsError, UnsupportedCall
from memplan.runtime import CompiledModule
from memplan.runtime import compile as memplan_compile
from tests.models import Made, TwoLayers
from tests.slow import slow


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers(8, 16)


@pytest.fixture
def compiled(model: TwoLayers, x: torch.Tensor) -> CompiledModule:
    return memplan_compile(model, (x,), sanitize="poison")


def test_second_derivatives_raise(model: TwoLayers, compiled: CompiledModule, x: torch.Tensor) -> None:
    loss = compiled(x).sum()
    with pytest.raises(UnsupportedCall, match="create_graph"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


def test_outputs_are_never_overwritten(compiled: CompiledModule, x: torch.Tensor) -> None:
    one = compiled(x)
    one.sum().backward()
    before = one.detach().clone()
    compiled(3 * x).sum().backward()
    with torch.no_grad():
        compiled(5 * x)
    assert torch.equal(one, before)


@pytest.mark.parametrize("what", ["input", "output", "parameter"])
def test_changing_what_the_backward_needs_raises(x: torch.Tensor, what: str) -> None:
    squares: Any = Made(lambda m, x: torch.tanh(x * m.w), w=nn.Parameter(torch.ones(8)))  # needs x, w, its result
    x.requires_grad_()
    step = memplan_compile(squares, (x,))
    out = step(x)
    with torch.no_grad():
        {"input": x, "output": out.detach(), "parameter": squares.w}[what].add_(1)
    with pytest.raises(StaleActivationsError, match="changed in place"):
        out.sum().backward()


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def _sums() -> Any:
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
