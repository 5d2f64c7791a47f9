"""Convolutions that write where they are told: oneDNN's fused sum, started from zero.

`aten.convolution` has no `out=` kernel, but oneDNN can add a convolution to what is there already (Inductor fuses
residual connections that way). Added to zero, it is the convolution, without the result's second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

Function = Callable[..., Any]
_WORTH = 1 << 16  # bytes of a result below which the longer call costs more than the copy that it saves


def direct_convolutions(args: Sequence[Any], nbytes: int) -> tuple[Function, ...]:
    """Callables that take the arguments of `aten.convolution` and `out`, to be tried: they may give other bits.

    None for what eager would not compute with oneDNN. Which zero the sum may start from, so that a result of -0.0
    stays one, is a matter of the kernel: `keeps_signs` finds out.
    """
    x, weight, bias, *how = args
    stride, padding, dilation, transposed, output_padding, groups = how
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(t.device.type != "cpu" or t.dtype is not torch.float32 for t in tensors):
        return ()
    if nbytes < _WORTH or transposed or x.dim() not in (4, 5) or (add := _adds_convolution()) is None:
        return ()
    used = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if used.name != "Mkldnn":
        return ()
    return tuple(f for zero in (0.0, -0.0) if keeps_signs(f := partial(_convolve, add, zero), args))


def keeps_signs(function: Function, args: Sequence[Any]) -> bool:
    """Whether sums of zeros have the sign that they have in `aten.convolution`."""
    x, weight, bias, *how = args
    biases = [None] if bias is None else [torch.full_like(bias, zero) for zero in (0.0, -0.0)]
    for zero in (0.0, -0.0):
        for b in biases:
            given = (torch.full_like(x, zero), weight, b, *how)
            expected = torch.ops.aten.convolution(*given)
            out = torch.empty_like(expected)
            try:
                function(*given, out=out)
            except RuntimeError:
                return False
            if not torch.equal(out.signbit(), expected.signbit()):
                return False
    return True


def _convolve(  # noqa: PLR0917  (the op's own signature)
    add: Function,
    zero: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    out.fill_(zero)
    add(out, x, weight, bias, padding, stride, dilation, groups, "add", 1.0, None, [], None)
    return out


@cache
def _adds_convolution() -> Function | None:
    """oneDNN's convolution that adds to its first argument, where torch was built with it."""
    try:
        overload: Function = torch.ops.mkldnn._convolution_pointwise_.binary._op
    except AttributeError:
        return None
    return overload
