"""Convolutions that write into the arena: the bits of eager's, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.runtime import compile as memplan_compile
from memplan.runtime.kernels.convolve import direct_convolutions
from memplan.runtime.kernels.probe import same_bytes
from tests.slow import slow
from tests.steps import assert_same_step

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


def test_small_transposed_and_double_convolutions_are_left_alone() -> None:
    x, weight, *rest = _arguments()
    assert direct_convolutions((x, weight, *rest), 100) == ()
    assert direct_convolutions((x.double(), weight.double(), *rest), LARGE) == ()
    transposed = (x, torch.randn(8, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
    assert direct_convolutions(transposed, LARGE) == ()


@pytest.mark.skipif(not _has_onednn, reason="torch was built without oneDNN")
@pytest.mark.parametrize("dims", [slow(1), 2, slow(3)])
def test_a_compiled_convolution_writes_into_the_arena(dims: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    model = nn.Sequential(kind(8, 16, 3, padding=1), nn.Sigmoid(), kind(16, 16, 3, padding=1), nn.Tanh())
    x = torch.randn(2, 8, *([2048], [48, 48], [8, 16, 16])[dims - 1])
    compiled = memplan_compile(model, x, sanitize="poison")
    direct = [op.direct for op in compiled.plan.graph.ops if op.target == "aten.convolution.default"]
    assert direct == [True, True]
    assert len(assert_same_step(model, copy.deepcopy(model), compiled, x)) == 4


@pytest.mark.parametrize("size", [8, slow(24)])
def test_at_another_shape_a_convolution_is_eagers_again(size: int) -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())
    batch = torch.export.Dim("batch", min=1, max=4)
    example = torch.randn(4, 8, size, size, dtype=torch.double if size < 9 else torch.float)
    compiled = memplan.compile(model.to(example.dtype), example, dynamic_shapes={"input": {0: batch}})
    for number in (4, 1, 4):
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
