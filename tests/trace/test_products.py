"""A product of three factors in one pass has every bit of the two passes that it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memplan.runtime import compile as memplan_compile
from memplan.trace import trace

SPECIAL = [-0.0, 0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 1.0, -1.1, 0.3, 3.4e38, -3.4e38, float("inf"), -float("inf")]
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from(SPECIAL)


def _bits(tensor: torch.Tensor) -> list[int]:
    flat: list[int] = tensor.detach().nan_to_num(nan=7.25).contiguous().view(-1).view(torch.int32).tolist()
    return flat


@given(
    st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40), st.floats(-1e3, 1e3) | st.sampled_from([0.5, -0.5])
)
def test_adding_minus_zero_changes_no_bit(pairs: list[tuple[float, float]], scale: float) -> None:
    x, y = (torch.tensor(side, dtype=torch.float32) for side in zip(*pairs, strict=True))
    zero = torch.tensor(-0.0)
    assert _bits(torch.addcmul(zero, x, y, value=scale)) == _bits((x * scale) * y)
    keep = x > 0
    assert _bits(torch.addcmul(zero, keep, y, value=scale)) == _bits((keep * scale) * y)


class Product(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(SPECIAL))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.w) / self.scale) * (x * self.w * 1.5)


@pytest.mark.parametrize(("scale", "divisions"), [(8.0, 0), (0.125, 0), (-2.0, 0), (3.0, 1)])
def test_a_quotient_by_a_power_of_two_is_a_product(scale: float, divisions: int) -> None:
    model = Product(scale)
    x = torch.tensor(SPECIAL)[:, None].flip(0)
    traced = trace(model, x, train=False)  # else the quotient waits for the backward
    assert sum(op.target == "aten.div.Tensor" for op in traced.graph.ops) == divisions
    assert any(op.target == "aten.addcmul.default" for op in traced.graph.ops)
    with torch.no_grad():
        assert _bits(memplan_compile(model, x)(x)) == _bits(model(x))


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a square": lambda x: _squared(x * 3) * 2,
    "a number beyond float32": lambda x: (x * 1e39) * (x + 1),
    "infinity": lambda x: (x * -math.inf) * (x + 1),
    "an integer that float64 rounds": lambda x: (x * (2**60 + 2**36 + 1)) * (x + 1),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_products_are_eager_s(name: str) -> None:
    model, x = Apply(ODD[name]), torch.tensor(SPECIAL)
    with torch.no_grad():
        assert _bits(memplan_compile(model, x, train=False)(x)) == _bits(model(x))
