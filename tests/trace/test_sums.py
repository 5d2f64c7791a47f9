"""Sums and products that are made in one pass or in place have every bit of eager's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import memplan
from memplan.core.choices import Gradients
from memplan.core.graph import Graph, Phase
from memplan.runtime import compile as memplan_compile
from memplan.trace import trace
from tests.models import Shared
from tests.slow import slow

OUTSIDE_AND_IN: tuple[Gradients, ...] = ("outside", "arena")


def _eager(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _sums(graph: Graph) -> list[str]:
    """Return the additions of the backward of which a result or an operand is a gradient that is returned."""
    kept = {graph.values[v].storage for v in graph.gradients}
    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD and op.target.startswith("aten.add")]
    return [op.target for op in backward if kept & set(graph.touched(op))]


@pytest.mark.parametrize("gradients", OUTSIDE_AND_IN)
@pytest.mark.parametrize("times", [1, slow(2), 4])
def test_shared_weights(times: int, gradients: Gradients) -> None:
    """Every sum is written over a term, and has eager's bits; one buffer holds the gradient of each parameter."""
    torch.manual_seed(0)
    model, tokens = Shared(times), torch.randint(50, (12,))
    expected = _eager(model, tokens)
    model.zero_grad()
    compiled = memplan.compile(model, tokens, gradients=gradients)
    for _ in range(2):
        compiled(tokens).backward()
        for p, gradient in zip(model.parameters(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, gradient)
            p.grad = None
    graph = compiled.plan.graph
    if gradients == "arena":  # outside, each sum is copied out
        assert _sums(graph) == ["aten.add_.Tensor"] * (1 + 8 * (times - 1))
    outside = compiled.plan.outside["gradients"]
    assert outside == (0 if gradients == "arena" else sum(p.numel() * 4 for p in model.parameters()))


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a tensor and its transpose": lambda w, x: ((w + w.t()) * x).sum(),
    "the same gradient for two": lambda w, x: (w + x).tanh().sum(),
    "a term is read again": lambda w, x: (w.tanh() * w.tanh().detach() + w * x).sum() + (w * w).sum(),
    "pieces": lambda w, x: (w[:3] * x[:3]).sum() + (w[2:] * x[2:]).sum(),
    "expanded": lambda w, x: w.sum() + (w.sum() * x).sum(),
    "another dtype": lambda w, x: (w.double() * x).sum().float() + (w * x).sum(),
    "complex": lambda w, x: (torch.complex(w, x) * torch.complex(x, w)).abs().sum() + (w * w).sum(),
    "another layout": lambda w, x: (w.t().contiguous() * x).sum() + (w @ x).sum() + (x @ w).t().tanh().sum(),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradients", OUTSIDE_AND_IN)
def test_small_sums(name: str, gradients: Gradients) -> None:
    """Sums of unusual terms have eager's bits, for parameters and inputs."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = (nn.Parameter(torch.randn(5, 5)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return CASES[name](self.w, x) + CASES[name](self.v, self.w)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 5, requires_grad=True)
    expected = [*_eager(model, x), x.grad.clone() if x.grad is not None else None]
    model.zero_grad()
    x.grad = None
    memplan.compile(model, x, gradients=gradients, sanitize="poison")(x).backward()
    for found, gradient in zip([model.w.grad, model.v.grad, x.grad], expected, strict=True):
        assert found is not None
        assert gradient is not None
        assert torch.equal(found, gradient)


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
