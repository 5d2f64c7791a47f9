"""Convolutions that write into the arena: the bits of eager's, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.runtime import compile as memplan_compile
from memplan.runtime.kernels import convolve
from memplan.runtime.kernels.convolve import direct_convolutions
from memplan.runtime.kernels.probe import same_bytes

aten = torch.ops.aten
_has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
LARGE = 1 << 20  # bytes: more than a result must have


def _arguments(groups: int = 1, *, channels_last: bool = False, bias: float | None = None) -> tuple[Any, ...]:
    x = torch.randn(2, 8, 48, 48)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    given = None if bias is None else torch.full((16,), bias)
    return x, torch.randn(16, 8 // groups, 3, 3), given, [1, 1], [1, 1], [1, 1], False, [0, 0], groups


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("bias", [None, 0.5, -0.0])
def test_what_is_offered_gives_the_same_bits(groups: int, channels_last: bool, bias: float | None) -> None:
    args = _arguments(groups, channels_last=channels_last, bias=bias)
    expected = aten.convolution(*args)
    for function in direct_convolutions(args, LARGE):
        out = torch.full_like(expected, float("nan"))
        function(*args, out=out)
        assert same_bytes(out, expected)
        zeros = (torch.zeros_like(args[0]), *args[1:])
        function(*zeros, out=out)
        assert same_bytes(out, aten.convolution(*zeros))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dims", [1, 3])
def test_one_and_three_dimensions_give_the_same_bits(dims: int, groups: int) -> None:
    size = {1: [512], 3: [6, 16, 16]}[dims]
    x, weight = torch.randn(2, 8, *size), torch.randn(16, 8 // groups, *[3] * dims)
    args = (x, weight, torch.randn(16), [2] * dims, [1] * dims, [1] * dims, False, [0] * dims, groups)
    functions = direct_convolutions(args, LARGE)
    assert bool(functions) == _has_onednn
    for function in functions:
        for given in (x, torch.randn_like(x) * 100, torch.zeros_like(x)):
            expected = aten.convolution(given, *args[1:])
            out = torch.full_like(expected, float("nan"))
            function(given, *args[1:], out=out)
            assert same_bytes(out, expected)


def test_small_transposed_and_double_convolutions_are_left_alone() -> None:
    x, weight, *rest = _arguments()
    assert direct_convolutions((x, weight, *rest), 100) == ()
    assert direct_convolutions((x.double(), weight.double(), *rest), LARGE) == ()
    transposed = (x, torch.randn(8, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
    assert direct_convolutions(transposed, LARGE) == ()


@pytest.mark.skipif(not _has_onednn, reason="torch was built without oneDNN")
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_compiled_convolution_writes_into_the_arena(dims: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(kind(8, 16, 3, padding=1), nn.Sigmoid(), kind(16, 16, 3, padding=1), nn.Tanh())
    x = torch.randn(2, 8, *([2048], [48, 48], [8, 16, 16])[dims - 1])
    compiled = memplan_compile(model, x, sanitize="poison")
    direct = [op.direct for op in compiled.plan.graph.ops if op.target == "aten.convolution.default"]
    assert direct == [True, True]
    expected = model(x)
    expected.sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    out = compiled(x)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert all(
        p.grad is not None and torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)
    )


@pytest.mark.parametrize("size", [8, 24])
def test_at_another_shape_a_convolution_is_eagers_again(size: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())
    batch = torch.export.Dim("batch", min=1, max=4)
    example = torch.randn(4, 8, size, size, dtype=torch.double if size < 9 else torch.float)
    compiled = memplan.compile(model.to(example.dtype), example, dynamic_shapes={"input": {0: batch}})
    for number in (4, 1, 2, 4):
        x = example[:number] * 0.7
        expected, out = model(x), compiled(x)
        assert torch.equal(out, expected)
        for result in (expected, out):
            result.square().sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            once = torch.autograd.grad(model(x).square().sum(), p)[0]
            assert torch.equal(p.grad, once + once)
            p.grad = None


class Used:
    """A backend of convolutions, as torch names it."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_cudnn_writes_to_the_arena_and_adds_the_bias_as_eager_does(
    monkeypatch: pytest.MonkeyPatch, transposed: bool, biased: bool
) -> None:
    """The CPU's kernels stand for cuDNN's: nobody here has run it on a GPU."""
    calls: list[tuple[Any, ...]] = []

    def by_cudnn(x: torch.Tensor, weight: torch.Tensor, *how: Any, out: torch.Tensor) -> None:
        calls.append(how)
        *shape, groups, _benchmark, _deterministic, _tf32 = how
        padding, *between, stride, dilation = shape
        output_padding = between[0] if between else [0, 0]
        out.copy_(aten.convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups))

    x, weight = torch.randn(2, 6, 9, 9), torch.randn(6, 6, 3, 3)
    bias = torch.randn(6) if biased else None
    args = (x, weight, bias, [2, 2], [1, 1], [1, 1], transposed, [1, 1] if transposed else [0, 0], 1)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: Used("CudnnTranspose" if transposed else "Cudnn"))
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda *_: torch.channels_last)
    found: Any = convolve.cudnn_convolution(args)
    packet = aten.cudnn_convolution_transpose if transposed else aten.cudnn_convolution
    assert found.func is convolve.convolve_by_cudnn
    assert found.args == (packet.out._op, torch.channels_last)
    expected = aten.convolution(*args[:2], None, *args[3:])
    expected = expected if bias is None else expected.add_(bias.view(1, -1, 1, 1))
    out = torch.full_like(expected, float("nan"))
    convolve.convolve_by_cudnn(by_cudnn, torch.channels_last, *args, out=out)
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-5)
    (how,) = calls
    names = [argument.name for argument in packet.out._schema.arguments][2:-1]
    assert len(how) == len(names)
    given = dict(zip(names, how, strict=True))
    assert (given["stride"], given["padding"], given["dilation"], given["groups"]) == ([2, 2], [1, 1], [1, 1], 1)
    assert (given["benchmark"], given["deterministic"], given["allow_tf32"]) == (False, False, True)
    monkeypatch.setattr(torch._C, "_select_conv_backend", lambda *_: Used("CudaDepthwise2d"))
    assert convolve.cudnn_convolution(args) is None
