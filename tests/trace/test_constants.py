"""What constants alone determine has eager's bits in every step, and what the model holds may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memplan
from tests.runtime.reference import Interpreted


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any], **held: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.25))
        self.function = function
        for name, tensor in held.items():
            setattr(self, name, tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


X = torch.linspace(-2, 2, 12).reshape(3, 4)


def mask(m: Any, x: torch.Tensor) -> Any:
    causal = torch.arange(4)[None, :] <= torch.arange(3)[:, None]
    return torch.where(causal, x * m.w, torch.tensor(-1.5))


def buckets(m: Any, x: torch.Tensor) -> Any:
    distance = torch.arange(4) - torch.arange(3)[:, None]
    near = torch.log(distance.abs().float() + 1).round().long()
    return x * m.w + torch.full((8,), 0.5).cumsum(0)[near]


CONSTANTS = {
    "mask": mask,
    "buckets": buckets,
    "literal": lambda m, x: x * m.w * torch.tensor([1.0, -0.0, 3.0, float("nan")]),
    "views": lambda m, x: (x * m.w + torch.arange(12.0).view(4, 3).t()) * torch.arange(12.0).view(3, 4),
    "layout": lambda m, x: x * m.w + torch.full((4, 3), 2.0).t().sin(),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_have_the_same_bits(name: str) -> None:
    model = Apply(CONSTANTS[name])
    outputs, gradients, _ = Interpreted(model, (X,)).run(X)
    result = memplan.compile(model, X)(X)
    result.backward(torch.ones_like(result))
    torch.testing.assert_close(result, outputs[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(model.w.grad, gradients["w"], rtol=0, atol=0, equal_nan=True)


KEPT = {
    "random": lambda m, x: x * m.w + torch.rand(4),
    "uninitialised": lambda m, x: x * m.w + torch.empty(4).copy_(x[0]),
    "a parameter": lambda m, x: x * (m.w * torch.arange(4.0)),
    "an input": lambda m, x: x * m.w + x.new_ones(4) * x[0],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_no_constant_determines_is_made_in_every_step(name: str) -> None:
    model = Apply(KEPT[name])
    compiled = memplan.compile(model, X)
    for x in (X, X.flip(0)):
        torch.manual_seed(0)
        expected = model(x)
        torch.manual_seed(0)
        assert torch.equal(compiled(x), expected)


def test_a_tensor_that_the_model_holds_may_change() -> None:
    model = Apply(lambda m, x: x * m.w * (m.scale * 2 + m.buffer * 3), scale=torch.ones(4))
    model.register_buffer("buffer", torch.ones(4))
    compiled = memplan.compile(model, X)
    for _ in range(2):
        assert torch.equal(compiled(X), model(X))
        model.__dict__["scale"].fill_(7.0)
        model.get_buffer("buffer").fill_(-3.0)


def test_what_the_caller_gets_is_made_anew() -> None:
    model = Apply(lambda m, x: (x * m.w + torch.arange(4.0), torch.arange(4.0), torch.arange(4.0)[1:]))
    compiled = memplan.compile(model, X)
    with torch.no_grad():
        for result in compiled(X)[1:]:
            result.fill_(99.0)
        again = compiled(X)
    for ours, theirs in zip(again, model(X), strict=True):
        assert torch.equal(ours, theirs)


def test_a_buffer_that_is_set_to_a_constant_is_set_by_every_step() -> None:
    class Sets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("state", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.get_buffer("state").copy_(torch.arange(4.0).add(1))
            return self.linear.forward(x)

    model = Sets()
    compiled = memplan.compile(model, X)
    for _ in range(2):
        model.get_buffer("state").zero_()
        compiled(X)
        assert torch.equal(model.get_buffer("state"), torch.arange(4.0).add(1))


def test_autocast_does_not_reach_constants_outside_of_it() -> None:
    def product(m: Any, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            table = torch.arange(16.0).view(4, 4).sin() @ torch.arange(16.0).view(4, 4).cos()
        return (x * m.w) @ table

    model = Apply(product)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled = memplan.compile(model, X)
        assert torch.equal(compiled(X), model(X))


def test_dropout_keeps_its_place() -> None:
    model = Apply(lambda m, x: F.dropout(x * m.w, 0.5) + F.dropout(torch.ones(4), 0.5) * m.w)
    compiled = memplan.compile(model, X)
    torch.manual_seed(3)
    expected = model(X)
    torch.manual_seed(3)
    assert torch.equal(compiled(X), expected)
