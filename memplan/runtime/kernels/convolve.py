"""Convolutions that write to a given tensor: oneDNN's fused sum, added to zeros.

`aten.convolution` has no `out=` kernel, but oneDNN can add a convolution to a tensor (Inductor fuses residual
connections that way). Added to zeros, it gives the convolution without a copy of the result. One-dimensional
convolutions run as two-dimensional ones with a first dimension of size 1, as in eager. oneDNN has no such sum for
transposed convolutions. On CUDA, eager calls cuDNN's convolution, which has an `out=` kernel of its own, and adds the
bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

Function = Callable[..., Any]
_DIMENSIONS_OF_CUDNN = (4, 5)  # of a batch of images or volumes; eager reshapes other inputs first
# By dimensions of the input, the bytes of a result below which the longer call costs more than the copy that it saves.
_WORTH = {3: 1 << 18, 4: 1 << 16, 5: 1 << 16}


def direct_convolutions(args: Sequence[Any], nbytes: int) -> tuple[Function, ...]:
    """Return callables that take the arguments of `aten.convolution` and `out`; the caller must compare their results.

    There are none if eager would not use oneDNN or cuDNN. Whether oneDNN's sum must start from 0.0 or -0.0, so that
    results of -0.0 keep their sign, depends on the kernel: `keeps_signs` tests it.
    """
    x, weight, bias, *how = args
    stride, padding, dilation, transposed, output_padding, groups = how
    tensors = [t for t in (x, weight, bias) if t is not None]
    if all(t.device.type == "cuda" for t in tensors):
        return (function,) if (function := cudnn_convolution(args)) is not None else ()
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


def cudnn_convolution(args: Sequence[Any]) -> Function | None:
    """Return what eager does with a convolution that it gives to cuDNN, into `out`; None for other convolutions."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    used = torch._C._select_conv_backend(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if x.dim() not in _DIMENSIONS_OF_CUDNN or used.name not in ("Cudnn", "CudnnTranspose"):
        return None
    layout = torch._C._conv_determine_backend_memory_format(x, weight, used)
    packet = torch.ops.aten.cudnn_convolution_transpose if transposed else torch.ops.aten.cudnn_convolution
    return partial(convolve_by_cudnn, packet.out._op, layout)


def convolve_by_cudnn(  # noqa: PLR0917  (the op's own signature)
    convolution: Function,
    layout: torch.memory_format,
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
    """Write a convolution to `out` by cuDNN, with the flags of now, and add the bias, as eager does."""
    deterministic = torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()
    precision: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    flags = (torch._C._get_cudnn_benchmark(), deterministic, precision.fp32_precision == "tf32")
    shape = (padding, output_padding, stride, dilation) if transposed else (padding, stride, dilation)
    given = (x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout))
    convolution(*given, *shape, groups, *flags, out=out)
    if bias is not None:
        out.add_(bias.view(1, -1, *[1] * (x.dim() - 2)))
    return out


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
