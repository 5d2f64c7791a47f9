"""Convolutions that write into the arena by cuDNN's `out=` kernel, which a stand-in on the CPU takes the place of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memplan

aten = torch.ops.aten
Kernel = Callable[..., Any]


@pytest.fixture
def cudnn(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Run a kernel as `aten::cudnn_convolution.out` on the CPU; what it was given is listed."""
    calls: list[Any] = []

    def run(*args: Any, out: Any) -> Any:
        *given, _benchmark, deterministic, _tf32 = args
        calls.append(deterministic)
        return request.param(given, out)

    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    library.impl("cudnn_convolution.out", run, "CPU")
    yield calls
    library._destroy()


def right(given: list[Any], out: Any) -> Any:
    x, weight, padding, stride, dilation, groups = given
    return out.copy_(aten.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups))


def one_bit_off(given: list[Any], out: Any) -> Any:
    right(given, out).view(torch.int32).bitwise_xor_(1)
    return out


def refused(*_: Any) -> Any:
    raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(4, 8, 3, bias=False),
    "bias": lambda: nn.Conv2d(4, 8, 3, padding=1),
    "groups": lambda: nn.Conv2d(4, 8, 3, groups=2, stride=2, dilation=2, bias=False),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, bias=False),
}


@pytest.mark.parametrize("cudnn", [right, one_bit_off, refused], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_what_cudnn_writes_is_taken_if_it_has_eagers_bits(
    name: str, cudnn: list[Any], request: pytest.FixtureRequest
) -> None:
    """Whole numbers make sums exact, so that adding the bias afterwards rounds as the CPU's kernel does."""
    torch.manual_seed(0)
    layer = MODELS[name]()
    for p in layer.parameters():
        p.data = torch.randint(-3, 4, p.shape).float()
    model = nn.Sequential(layer, nn.ReLU())
    x = torch.randint(-3, 4, (2, 4, 9, 9)).float()
    compiled = memplan.compile(model, x)
    convolution = next(op for op in compiled.plan.graph.ops if op.target == "aten.convolution.default")
    writes = request.node.callspec.params["cudnn"] is right and name != "transposed"
    assert convolution.direct == writes
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    cudnn.clear()
    try:
        compiled(x).sum().backward()
    finally:
        torch.backends.cudnn.deterministic = before
    assert cudnn == [True] * writes  # flags are those of the call, as in eager
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    result = model(x)
    result.sum().backward()
    assert torch.equal(compiled(x), result)
    torch.testing.assert_close(ours, {name: p.grad for name, p in model.named_parameters()}, rtol=0, atol=0)


def test_a_gpus_plan_knows_which_convolutions_write_in_place() -> None:
    layers = [
        nn.Conv2d(4, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 4, 3),
    ]
    plan = memplan.plan(nn.Sequential(*layers), torch.ones(2, 4, 9, 9), target="h200", kernels="aten")
    found = [op.direct for op in plan.graph.ops if op.target == "aten.convolution.default"]
    assert found == [True, True, False, False]
