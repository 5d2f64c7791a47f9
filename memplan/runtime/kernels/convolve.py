"""Convolutions that write to a given tensor: oneDNN's fused sum, added to zeros.

`aten.convolution` has no `out=` kernel, but oneDNN can add a convolution to a tensor (Inductor fuses residual
connections that way). Added to zeros, it gives the convolution without a copy of the result. One-dimensional
convolutions run as two-dimensional ones with a first dimension of size 1, as in eager. oneDNN has no such sum for
transposed convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

Function = Callable[..., Any]
# By dimensions of the input, the bytes of a result below which the longer call costs more than the copy that it saves.
_WORTH = {3: 1 << 18, 4: 1 << 16, 5: 1 << 16}


def direct_convolutions(args: Sequence[Any], nbytes: int) -> tuple[Function, ...]:
    """Return callables that take the arguments of `aten.convolution` and `out`; the caller must compare their results.

    There are none if eager would not use oneDNN. Whether the sum must start from 0.0 or -0.0, so that results of -0.0
    keep their sign, depends on the kernel: `keeps_signs` tests it.
    """
    x, weight, bias, *how = args
    stride, padding, dilation, transposed, output_padding, groups = how
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(t.device.type != "cpu" or t.dtype is not torch.float32 for t in tensors):
        return ()
    if transposed or nbytes < _WORTH.get(x.dim(), nbytes + 1) or (add := _adding_convolution()) is None:
        return ()
    used = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if used.name != "Mkldnn":
        return ()
    convolve = _convolve_1d if x.dim() == 3 else _convolve
    return tuple(f for zero in (0.0, -0.0) if keeps_signs(f := partial(convolve, add, zero), args))


def keeps_signs(function: Function, args: Sequence[Any]) -> bool:
    """Return whether zeros in the results of `function` have the same signs as in those of `aten.convolution`."""
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


def _convolve_1d(
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
def _adding_convolution() -> Function | None:
    """Return oneDNN's convolution that adds to its first argument; None if torch was built without oneDNN."""
    try:
        overload: Function = torch.ops.mkldnn._convolution_pointwise_.binary._op
    except AttributeError:
        return None
    return overload
