"""Transforms around a planned step (torch.func, forward mode): refused, or run by the original; never zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import memplan
from memplan.errors import UnsupportedCall

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by torch's own jvp

Call = Callable[..., Any]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _dual(call: Call, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(x, torch.ones_like(x)))  # type: ignore[no-untyped-call]
        return forward_ad.unpack_dual(out).tangent.clone()  # type: ignore[no-untyped-call]


def _to_parameters(call: Any, x: torch.Tensor) -> Any:
    parameters = dict(call.named_parameters())
    return grad(lambda p: functional_call(call, p, (x,)).sum())(parameters)["0.weight"]


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda call, x: grad(lambda y: call(y).sum())(x),
    "grad of parameters": _to_parameters,
    "vmap": lambda call, x: vmap(call)(torch.stack([x, 2 * x])),
    "vmap of something else": lambda call, x: vmap(lambda factor: call(x) * factor)(torch.ones(2)),
    "jvp": lambda call, x: jvp(call, (x,), (x,))[1],
    "jacrev": lambda call, x: jacrev(call)(x),
    "dual": _dual,
}


@pytest.mark.parametrize("train", [True, False])
def test_refused_around_a_compiled_module(train: bool) -> None:
    model, x = _model(), torch.randn(3, 4)
    expected = model(x)
    compiled = memplan.compile(model, x, train=train)
    for name, transform in TRANSFORMS.items():
        with pytest.raises(UnsupportedCall, match=r"on_mismatch|original model") as raised:
            transform(compiled, x)
        assert raised.value.where == "the call", name
    assert torch.equal(compiled(x), expected), "and the next plain call runs"


def test_refused_around_a_whole_step() -> None:
    model, x = _model(), torch.randn(3, 4)
    step = memplan.compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out: out.sum(), x)
    before = [p.clone() for p in model.parameters()]
    for name in ("grad", "vmap", "dual"):
        with pytest.raises(UnsupportedCall):
            TRANSFORMS[name](step, x)
    assert all(map(torch.equal, before, model.parameters())), "nothing was updated"


def test_torch_compile_sees_dual_tensors() -> None:
    model, x = _model(), torch.randn(3, 4)
    planned = torch.compile(model, backend=memplan.Backend())
    planned(x)
    with pytest.raises(UnsupportedCall, match="dual"):
        _dual(planned, x)
    assert torch.equal(TRANSFORMS["grad"](planned, x), TRANSFORMS["grad"](model, x)), "dynamo steps aside"
