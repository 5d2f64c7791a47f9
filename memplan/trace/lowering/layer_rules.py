"""Lowering rules for layers and losses: the steps of their CPU kernels, with every result where it is planned.

Each rule gives the bits of the op that it replaces, or returns None: leave the op as it is. `rules.py` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.rewrite import Rewriter, aten, value

_MEAN, _SUM = 1, 2  # `at::Reduction` of losses


def copied(rw: Rewriter, source: fx.Node) -> fx.Node:
    """Return the node's result, filled with `source`."""
    result = rw.memory(value(rw.node))
    rw.call(aten.copy_.default, result, source)
    return result


def embedding(rw: Rewriter, weight: fx.Node, indices: fx.Node, *_: Any, **__: Any) -> fx.Node | None:
    """Gather rows by a flat index, as the kernel itself does (aten/src/ATen/native/Embedding.cpp)."""
    index = value(indices)
    if not index.is_contiguous() or index.dtype is not torch.int64:
        return None
    result = rw.memory(value(rw.node))
    rows = rw.call(aten.view.default, result, [index.numel(), value(weight).shape[1]])
    rw.call(aten.index_select.out, weight, 0, rw.call(aten.view.default, indices, [index.numel()]), out=rows)
    return result


def dropout(rw: Rewriter, x: fx.Node, p: float, train: bool | None) -> tuple[fx.Node, fx.Node] | None:
    """Make the mask and the product, on the CPU; CUDA's fused kernel draws in another order (native/Dropout.cpp)."""
    if value(x).device.type != "cpu" or train is not True or not 0.0 < p < 1.0 or value(x).is_complex():
        return None
    out, mask = value(rw.node)
    keep = rw.memory(mask)
    rw.call(aten.bernoulli_.float, keep, 1 - p)
    if out.dtype is torch.float32:  # a kept element is rounded once either way
        result = rw.making(out, aten.mul.Tensor, keep, 1.0 / (1 - p))
        rw.call(aten.mul_.Tensor, result, x)
        return result, keep
    result = rw.memory(out)
    rw.call(aten.copy_.default, result, keep)
    rw.call(aten.div_.Tensor, result, 1 - p)  # rounded to half precision before the product is
    rw.call(aten.mul_.Tensor, result, x)
    return result, keep


def dropout_backward(rw: Rewriter, grad: fx.Node, mask: fx.Node, scale: float) -> fx.Node | None:
    """Compute grad * (mask * scale) on the CPU, without the two temporaries.

    Half precision follows eager, which multiplies by the scale that its forward rounded; the traced kernel rounds once.
    """
    if value(grad).device.type != "cpu" or value(grad).is_complex():
        return None
    if value(rw.node).dtype is torch.float32:
        result = rw.instead(aten.mul.Tensor, mask, scale)
    else:
        result = copied(rw, mask)
        rw.call(aten.mul_.Tensor, result, scale)
    rw.call(aten.mul_.Tensor, result, grad)
    return result


def mse_loss(rw: Rewriter, x: fx.Node, y: fx.Node, reduction: int = 1) -> fx.Node | None:
    """Square the difference, then reduce, as the kernel does (native/Loss.cpp); `mse_loss.out` resizes its out."""
    if reduction not in (_MEAN, _SUM):
        return None
    difference = rw.call(aten.sub.Tensor, x, y)
    rw.call(aten.mul_.Tensor, difference, difference)
    return _reduced(rw, difference, reduction)


def loss_of(unreduced: Any) -> Callable[..., Any]:
    """Return the rule for a loss whose `out` variant computes the unreduced loss in `out`, resized, and then reduces
    that.
    """

    def rule(rw: Rewriter, x: fx.Node, y: fx.Node, reduction: int = 1, *options: Any) -> fx.Node | None:
        """Compute the unreduced loss, then reduce it."""
        in_rows = value(x).is_contiguous() and value(y).is_contiguous()  # otherwise each loss has another layout
        if reduction not in (_MEAN, _SUM) or not in_rows:
            return None
        return _reduced(rw, rw.call(unreduced, x, y, 0, *options), reduction)

    return rule


def _reduced(rw: Rewriter, losses: fx.Node, reduction: int) -> fx.Node:
    """Return the mean or the sum of all elements, in place of the op."""
    if reduction == _SUM:
        return rw.instead(aten.sum.dim_IntList, losses, None)
    return rw.instead(aten.mean.default, losses)


def batch_norm(  # noqa: PLR0917  (the op's own signature)
    rw: Rewriter,
    x: fx.Node,
    weight: Any,
    bias: Any,
    mean: fx.Node,
    var: fx.Node,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[fx.Node, ...] | None:
    """Update copies of the running statistics, on the CPU: `native_batch_norm.out` updates them in place."""
    given = [value(n) for n in (x, weight, bias, mean, var) if n is not None]
    if value(x).device.type != "cpu" or not training or any(t.dtype != torch.float32 for t in given):
        return None
    if not _is_dense(value(x)):  # for other layouts, the kernel that writes to `out` rounds differently
        return None
    out, save_mean, save_rstd, new_mean, new_var = (rw.memory(result) for result in value(rw.node))
    rw.call(aten.copy_.default, new_mean, mean)
    rw.call(aten.copy_.default, new_var, var)
    rw.call(
        aten._native_batch_norm_legit.out,
        *(x, weight, bias, new_mean, new_var, training, momentum, eps),
        out=out,
        save_mean=save_mean,
        save_invstd=save_rstd,
    )
    return out, save_mean, save_rstd, new_mean, new_var


def batch_norm_backward(  # noqa: PLR0917  (the op's own signature)
    rw: Rewriter, grad: fx.Node, x: fx.Node, weight: Any, mean: Any, var: Any, *rest: Any
) -> fx.Node | None:
    """Pass no running statistics in training mode, where the kernel reads none: so none are kept for the backward."""
    save_mean, _, training, *_ = rest
    if training is not True or save_mean is None or (mean is None and var is None):
        return None
    if any(value(one).dtype != value(save_mean).dtype for one in (mean, var) if one is not None):
        return None
    return rw.instead(aten.native_batch_norm_backward.default, grad, x, weight, None, None, *rest)


def _is_dense(x: torch.Tensor) -> bool:
    """Return whether a tensor is laid out as convolutions lay out their results: contiguous, or channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))


def embedding_backward(  # noqa: PLR0917  (the op's own signature)
    rw: Rewriter, grad: fx.Node, indices: fx.Node, rows: int, padding: int, scale_by_frequency: bool
) -> fx.Node | None:
    """Add rows up in the order of the indices, on the CPU; rows of the padding index stay zero.

    In half precision the two kernels round differently, so only full precision is rewritten.
    """
    index, full = value(indices), (torch.float32, torch.float64)
    if value(grad).device.type != "cpu" or scale_by_frequency or value(grad).dtype not in full:
        return None
    if not index.is_contiguous() or index.dtype != torch.int64:
        return None
    result = rw.memory(value(rw.node))
    rw.call(aten.zero_.default, result)
    flat = rw.call(aten.view.default, indices, [index.numel()])
    if not value(grad).is_contiguous():  # such as that of an LSTM with batch_first
        with rw.mode:
            dense = torch.empty_like(value(grad), memory_format=torch.contiguous_format)
        contiguous = rw.scratch(dense)
        rw.call(aten.copy_.default, contiguous, grad)
        grad = contiguous
    source = rw.call(aten.view.default, grad, [index.numel(), value(grad).shape[-1]])
    rw.call(aten.index_add_.default, result, 0, flat, source)
    if padding >= 0:
        rw.call(aten.zero_.default, rw.call(aten.select.int, result, 0, padding))
    return result


def safe_softmax(rw: Rewriter, x: fx.Node, dim: int, dtype: torch.dtype | None = None) -> fx.Node | None:
    """Compute a softmax, then zero the rows of nothing but -inf, as the op does (native/transformers/attention.cpp)."""
    if dtype not in (None, value(x).dtype):
        return None
    empty = rw.call(aten.all.dim, rw.call(aten.eq.Scalar, x, float("-inf")), dim, True)
    result = rw.instead(aten._softmax.default, x, dim, False)  # last, so that it may take the bytes of x
    rw.call(aten.masked_fill_.Scalar, result, empty, 0.0)
    return result
