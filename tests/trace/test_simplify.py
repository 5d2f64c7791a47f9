"""Ops that need not run are taken out, and no bit changes; what a copy protects stays protected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from memplan.runtime import compile as memplan_compile
from memplan.trace import trace
from tests.models import Apply
from tests.runtime.reference import Interpreted

X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
X[0, 0] = torch.tensor([-0.0, float("nan"), float("inf"), 1e-40])


def cloned(y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y, y.clone(), y * 1.0, y.clone() * w


def viewed(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y.view(6, 4), y.view(6, 4)


# What is applied, and how many ops its forward is left with.
FEWER: dict[str, tuple[Callable[..., Any], int]] = {
    "times one": (lambda w, x: (x * w) * 1.0 / 1 * w, 2),
    "to the power of one": (lambda w, x: torch.pow(x * w, 1.0) * w, 2),
    "a clone": (lambda w, x: (x * w).clone() * w, 2),
    "dropout without dropout": (lambda w, x: F.dropout(x * w, 0.0) * w, 2),
    "no padding": (lambda w, x: F.pad(x * w, (0, 0, 0, 0)) * w, 2),
    "views of what is gone": (lambda w, x: ((x * w) * 1.0).view(6, 4).t()[1:].unsqueeze(0) * w, 2),
    "another dtype": (lambda w, x: (x * w).double() * 2, 3),
    "a part of something larger": (lambda w, x: (x * w)[:1] * 1.0 * w, 3),  # else all of it would stay alive
}


@pytest.mark.parametrize("name", FEWER)
def test_fewer_ops_give_the_same_bits(name: str) -> None:
    function, count = FEWER[name]
    model = Apply(function)
    assert trace(model, X).graph.forward_ops == count
    outputs, gradients, _ = Interpreted(model, (X,)).run(X)
    result = memplan_compile(model, X, sanitize="poison")(X)
    result.backward(torch.ones_like(result))
    assert _bits(result) == _bits(outputs[0])
    assert model.w.grad is not None
    assert _bits(model.w.grad) == _bits(gradients["w"])


COMPLEX: dict[str, Callable[..., Any]] = {
    "times one": lambda w, x: torch.view_as_real((x * w) * 1) + 1,
    "by one": lambda w, x: torch.view_as_real((x * w) / 1) + 1,
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_keep_their_ops(name: str) -> None:
    sides = torch.tensor([-0.0, float("inf"), 1.7, 3e38, -1.1, 0.3, 1e-40, 0.0, 1e30])
    x, model = torch.complex(sides[:, None].expand(9, 9), sides.flip(0)), Apply(COMPLEX[name])
    with torch.no_grad():
        ours, theirs = memplan_compile(model, torch.ones_like(x), train=False)(x), model(x)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert _bits(ours.nan_to_num(7.25)) == _bits(theirs.nan_to_num(7.25))


def _bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
    return flat


PROTECTED: dict[str, Callable[..., Any]] = {
    "a clone of an input": lambda w, x: (x.clone() * w, x.clone()),
    "a clone of what is returned": lambda w, x: cloned(x * w, w),
    "a clone of a parameter": lambda w, x: (x * w, w.clone()),
    "the same twice": lambda w, x: (x * w, x * w),
    "the same view twice": lambda w, x: viewed(x * w),
}


@pytest.mark.parametrize("name", PROTECTED)
def test_what_the_caller_holds_is_apart_as_in_eager(name: str) -> None:
    model = Apply(PROTECTED[name])
    x, y = X.clone(), X.clone()
    with torch.no_grad():
        ours, theirs = memplan_compile(model, X)(x), model(y)
        for i in range(len(ours)):
            ours[i].fill_(float(i))
            theirs[i].fill_(float(i))
    for one, two in zip((*ours, x), (*theirs, y), strict=True):
        assert _bits(one) == _bits(two)
