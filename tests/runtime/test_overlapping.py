"""Layouts in which elements share bytes (`expand`, `unfold`, `as_strided`): of inputs, outputs and their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from memplan.core.choices import OnMismatch
from memplan.errors import InputMismatch, UnsupportedGraph
from tests.models import Made
from tests.steps import Training, sgd


def _scaled(size: int, after: Callable[[torch.Tensor], Any] = lambda y: y) -> Any:
    """x * w, and what `after` makes of it."""
    return Made(lambda m, x: after(x * m.w), w=nn.Parameter(torch.randn(size)))


_WINDOWS: dict[str, Callable[[], torch.Tensor]] = {
    "unfold": lambda: torch.randn(16).unfold(0, 3, 1),
    "expand": lambda: torch.randn(3).expand(14, 3),
}


@pytest.mark.parametrize("how", ["error", "replan"])
@pytest.mark.parametrize("example", _WINDOWS)
def test_a_dense_call_after_an_overlapping_example(example: str, how: OnMismatch) -> None:
    torch.manual_seed(0)
    model, x, dense = _scaled(3), _WINDOWS[example](), torch.randn(14, 3)
    compiled = memplan.compile(model, x, on_mismatch=how)
    assert torch.equal(compiled(x), model(x))
    other = _WINDOWS[example]()
    assert torch.equal(compiled(other), model(other)), "the same layout, other numbers"
    if how == "error":
        with pytest.raises(InputMismatch, match=r"input 0: has strides \(3, 1\).*elements share bytes"):
            compiled(dense)
    else:
        assert torch.equal(compiled(dense), model(dense))


def test_an_overlapping_call_after_a_dense_example() -> None:
    model = _scaled(3)
    compiled = memplan.compile(model, torch.randn(14, 3))
    for make in _WINDOWS.values():
        x = make()
        assert torch.equal(compiled(x), model(x))


def test_a_dense_batch_after_an_overlapping_one() -> None:
    torch.manual_seed(0)
    Training(_scaled(3), sgd, torch.sum, _WINDOWS["unfold"]()).both(torch.randn(14, 3))


def test_an_overlapping_example_beside_a_varying_one() -> None:
    class Shifted(nn.Module):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return x + shift

    model, x, shift = Shifted(), torch.randn(5, 2, 3), torch.randn(3).expand(2, 3)
    varying: Any = ({0: Dim("n", min=2, max=64)}, {})
    compiled = memplan.compile(model, (x, shift), train=False, dynamic_shapes=varying, on_mismatch="error")
    other = torch.randn(9, 2, 3)
    assert torch.equal(compiled(other, shift), model(other, shift))
    with pytest.raises(InputMismatch, match=r"input 1: .*elements share bytes"):
        compiled(torch.randn(7, 2, 3), torch.randn(2, 3))


def test_an_overlapping_input_that_forward_changes_is_refused() -> None:
    class Changed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    with pytest.raises(UnsupportedGraph, match="elements share bytes"):
        memplan.compile(Changed(), torch.randn(16).unfold(0, 3, 1), train=False, fullgraph=True)
    with pytest.raises(UnsupportedGraph, match="refers to a single memory location") as refused:
        memplan.compile(Changed(), torch.randn(1, 3).expand(4, 3), train=False, fullgraph=True)
    assert refused.value.see == "resized-input"


_OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "unfold": lambda y: y.unfold(-1, 3, 1),
    "as_strided": lambda y: y.as_strided((4, 3), (1, 1)),
    "expand": lambda y: y.unsqueeze(0).expand(3, 2, 16),
    "beside a transposed one": lambda y: (y.unfold(-1, 3, 1), y.sin().t()),
}


@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("after", _OUTPUTS)
def test_gradients_of_overlapping_outputs_are_those_of_eager(after: str, way: str) -> None:
    torch.manual_seed(0)
    model, x = _scaled(16, _OUTPUTS[after]), torch.randn(2, 16, requires_grad=True)
    eager, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    compiled: Any = torch.compile(model, backend=memplan.Backend())
    _backward(memplan.compile(model, x, gradients="outside", sanitize="poison") if way == "compile" else compiled, x)
    _backward(eager, y)
    assert torch.equal(model.w.grad, eager.w.grad)
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def _backward(model: Callable[..., Any], x: torch.Tensor) -> None:
    """A backward in which every element of an output has a gradient of its own."""
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs).backward()
