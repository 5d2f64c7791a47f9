"""One call: what it returns, which gradients follow, and what it leaves behind, as eager does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memplan.runtime import CompiledModule
from memplan.runtime import compile as memplan_compile
from tests.models import Made


def _x(*, grad: bool = False) -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(grad)


_Function = Callable[[Any, torch.Tensor, torch.Tensor], Any]


def _pair(function: _Function, *, grad: bool = False, **options: Any) -> tuple[Any, Any, CompiledModule]:
    """A linear layer with a function of itself, its input and its result; and a copy with what was compiled of it."""
    torch.manual_seed(0)
    model = Made(lambda m, x: function(m, x, m.linear(x)), linear=nn.Linear(4, 4), mean=torch.zeros(4))
    twin = copy.deepcopy(model)
    return model, twin, memplan_compile(twin, (_x(grad=grad),), **options)


def _alike(one: Any, two: Any) -> None:
    assert torch.equal(one, two)
    assert (one.stride(), one.dtype, one.requires_grad) == (two.stride(), two.dtype, two.requires_grad)


def _gradients(model: nn.Module, x: torch.Tensor, loss: Callable[[Any], torch.Tensor]) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss(model(x)).backward()  # type: ignore[no-untyped-call]
    return [x.grad, *(p.grad for p in model.parameters())]


_LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "both": lambda r: r[0].sum() + (r[1] * 3).sum(),
    "first": lambda r: r[0].square().sum(),
    "second": lambda r: (r[1] * torch.arange(3.0)[:, None]).sum(),
    "turned": lambda r: (r[0].t() @ torch.ones(3, 2)).square().sum(),
    "expanded": lambda r: r[0].mean(),
}


@pytest.mark.parametrize("loss", _LOSSES)
def test_gradients_are_eagers_for_every_tangent_and_none_where_eagers_are(loss: str) -> None:
    """The second result depends on the weight alone, the first on all."""

    def function(m: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return y.relu() * x, x @ m.linear.weight

    model, _, compiled = _pair(function, grad=True)
    for _ in range(2):
        eager_x, x = _x(grad=True), _x(grad=True)
        expected = _gradients(model, eager_x, _LOSSES[loss])
        found = _gradients(compiled, x, _LOSSES[loss])
        for one, two in zip(found, expected, strict=True):
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                assert torch.equal(one, two)


def test_results_that_need_no_gradient_still_require_one_as_in_eager() -> None:
    model, _, compiled = _pair(lambda m, x, y: torch.linalg.vector_norm(y, 0))
    expected, found = model(_x()), compiled(_x())
    _alike(found, expected)
    expected.backward()
    found.backward()


def test_changes_in_place_count_as_in_eager() -> None:
    def function(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        m.mean.mul_(0.5).add_(y.detach().mean(0))
        x.mul_(2.0)
        return torch.nn.functional.linear(x.clone(), m.linear.weight, m.linear.bias)

    model, twin, compiled = _pair(function)
    for _ in range(3):
        eager_x, x = _x(), _x()
        versions = [t._version for t in (eager_x, model.mean, x, twin.mean)]
        _alike(compiled(x), model(eager_x))
        after = [t._version for t in (eager_x, model.mean, x, twin.mean)]
        assert torch.equal(x, eager_x)
        assert torch.equal(twin.mean, model.mean)
        assert all(now > then for now, then in zip(after, versions, strict=True))
        with torch.no_grad():
            _alike(compiled(_x()), model(_x()))
    fresh = torch.full((4,), 7.0)
    model.mean, twin.mean = fresh.clone(), fresh.clone()
    version = twin.mean._version
    _alike(compiled(_x()), model(_x()))
    assert torch.equal(twin.mean, model.mean)
    assert twin.mean._version > version
    with torch.inference_mode():
        given = _x()
        compiled(given)
        assert torch.equal(given, _x() * 2)
