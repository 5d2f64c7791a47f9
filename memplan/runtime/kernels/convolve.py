"""Convolutions that write where they are told: oneDNN's fused sum, started from zero.

`aten.convolution` has no `out=` kernel, but oneDNN can add a convolution to what is there already (Inductor fuses
residual connections that way). Added to zero, it is the convolution, without the result's second copy. In one
dimension, eager's own kernel sees two, the first of size 1, and so does this one. There is no such sum for transposed
convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

Function = Callable[..., Any]
# Bytes of a result, by dimensions of the input, below which the longer call costs more than the copy that it saves.
_WORTH = {3: 1 << 18, 4: 1 << 16, 5: 1 << 16}


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
    if transposed or nbytes < _WORTH.get(x.dim(), nbytes + 1) or (add := _adds_convolution()) is None:
        return ()
    used = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if used.name != "Mkldnn":
        return ()
    convolve = _convolve_line if x.dim() == 3 else _convolve
    return tuple(f for zero in (0.0, -0.0) if keeps_signs(f := partial(convolve, add, zero), args))


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


def _convolve_line(
    add: Function,
    zero: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *how: Any,
    out: torch.Tensor,
) -> torch.Tensor:
    stride, padding, dilation, *rest = how
    given = (x.unsqueeze(2), weight.unsqueeze(2), bias, (1, *stride), (0, *padding), (1, *dilation), *rest)
    _convolve(add, zero, *given, out=out.unsqueeze(2))
    return out


@cache
def _adds_convolution() -> Function | None:
    """oneDNN's convolution that adds to its first argument, where torch was built with it."""
    try:
        overload: Function = torch.ops.mkldnn._convolution_pointwise_.binary._op
    except AttributeError:
        return None
    return overload
