"""Finds the kernel that `aten.convolution` and its backward call on the CPU, so that it can be called directly.

The algorithm depends on shapes, dtypes and threads (Convolution.cpp in PyTorch); torch is asked for it once. The
algorithm for small inputs (`_slow_conv2d`) has true out variants, so that no result is copied; that of
oneDNN has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

Arguments = Callable[[Sequence[Any]], tuple[Any, ...]]
aten = torch.ops.aten
_DIMENSIONS = 4  # of a batch of images; `aten.convolution` reshapes other inputs first
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """An overload (possibly an out variant), and the function that converts the arguments of the op to its own."""

    overload: OpOverload
    arguments: Arguments


def inner_convolution(target: OpOverload, args: Sequence[Any], *, apart: bool) -> Inner | None:
    """Return the kernel that `target`, one of `CONVOLUTIONS`, calls with these arguments; None if none is callable.

    The caller must compare its results. `apart`: the results share no bytes with the arguments, so that out variants
    may be used.
    """
    backward = target is aten.convolution_backward.default
    x, weight = args[1:3] if backward else args[:2]
    tensors = [t for t in args[:3] if t is not None]
    if x.dim() != _DIMENSIONS or any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return None
    stride, padding, dilation, transposed, output_padding, groups = args[4:10] if backward else args[3:9]
    if transposed or (backward and not all(args[10])):  # out variants need memory for every result
        return None
    bias = weight.new_empty(weight.shape[0]) if backward else args[2]
    used = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if used.name == "Slow2d" and groups == 1:
        return (_slow_backward if backward else _slow_forward)(list(weight.shape[2:]), apart=apart)
    if used.name == "Mkldnn" and not backward:
        return Inner(overload=aten.mkldnn_convolution.default, arguments=_onednn)
    return None


def _slow_forward(kernel: list[int], *, apart: bool) -> Inner:
    def arguments(args: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias, stride, padding = args[:5]
        return x, weight, kernel, bias, stride, padding

    packet = aten._slow_conv2d_forward
    return Inner(overload=packet.output if apart else packet.default, arguments=arguments)


def _slow_backward(kernel: list[int], *, apart: bool) -> Inner:
    def arguments(args: Sequence[Any]) -> tuple[Any, ...]:
        grad, x, weight, _, stride, padding = args[:6]
        return grad, x, weight, kernel, stride, padding, *([] if apart else [args[10]])

    packet = aten._slow_conv2d_backward
    return Inner(overload=packet.grad_input if apart else packet.output_mask, arguments=arguments)


def _onednn(args: Sequence[Any]) -> tuple[Any, ...]:
    x, weight, bias, stride, padding, dilation, _, _, groups = args
    return x, weight, bias, padding, stride, dilation, groups
