"""Lowering rules: ops without a true `out=` kernel, rewritten into memory without a kernel and kernels that fill it.

Each rule replaces one node by memory (`empty_strided`) and kernels that write into it, with the same bits, or returns
None: leave the op as it is. `RULES` is the table. An op that has neither an out variant nor a rule runs functionally
and is reported as outside the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.nodes import keys_of, written_in
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value
from memplan.trace.passes.simplify import SLICES

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
    if reduction == _SUM:
        return rw.instead(aten.sum.dim_IntList, difference, None)
    return rw.instead(aten.mean.default, difference)


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


Rule = Callable[..., Any]  # (rewriter, *the node's args, **kwargs) -> node, tuple of nodes, or None: leave it


def lower(graph: fx.Graph) -> None:
    """Apply the rules to every node that has one, in place."""
    mode, written = fake_mode_of(graph), written_in(graph)
    for node in list(graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        rewriter = Rewriter(graph, mode, node)
        rewriter.written = written
        new = rule(rewriter, *node.args, **node.kwargs)
        if new is not None:
            _replace(graph, node, new)


def _replace(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    """Replace a node by `new`: one node, or one for each result."""
    if isinstance(new, tuple):
        for user in list(node.users):
            index: Any = user.args[1]
            user.replace_all_uses_with(new[index])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(new)
    graph.erase_node(node)


def _copy(rw: Rewriter, source: fx.Node, **_: Any) -> fx.Node | None:
    """Lower clone and _to_copy: convert and lay out while copying."""
    return copied(rw, source) if value(source).device == value(rw.node).device else None


def _as_tensor_op(target: Any) -> Rule:
    """Return the rule for an op X.Scalar, which wraps its scalar and calls X.Tensor."""

    def rule(rw: Rewriter, x: fx.Node, other: Any, *alpha: Any, **kwargs: Any) -> fx.Node:
        """Call the op for tensors with the number."""
        return rw.instead(target, x, other, **kwargs, **({"alpha": alpha[0]} if alpha else {}))

    return rule


def _relu(rw: Rewriter, x: fx.Node) -> fx.Node:
    """Lower relu to a clamp at zero."""
    return rw.instead(aten.clamp_min.default, x, 0)


def _sum(rw: Rewriter, x: fx.Node, *, dtype: torch.dtype | None = None) -> fx.Node:
    """Lower a sum of all elements to a sum over dimensions."""
    return rw.instead(aten.sum.dim_IntList, x, None, dtype=dtype)


def _scattered_into_zeros(view: Any) -> Rule:
    """Return the rule for slice_backward and select_backward: write the gradient into a view of zeros."""

    def rule(rw: Rewriter, grad: fx.Node, sizes: Any, *where: Any) -> fx.Node:
        """Write the gradient into a view of zeros."""
        result = rw.memory(value(rw.node))
        rw.call(aten.zero_.default, result)
        rw.call(aten.copy_.default, rw.call(view, result, *where), grad)
        return result

    return rule


def _scatter(view: Any) -> Rule:
    """Return the rule for select_scatter and slice_scatter: copy, then write into a view of the copy."""

    def rule(rw: Rewriter, x: fx.Node, source: fx.Node, *where: Any, **kwargs: Any) -> fx.Node:
        """Copy `x`, then write `source` into a view of the copy."""
        result = copied(rw, x)
        rw.call(aten.copy_.default, rw.call(view, result, *where, **kwargs), source)
        return result

    return rule


def _pad(rw: Rewriter, x: fx.Node, pad: list[int], fill: float = 0) -> fx.Node:
    """Fill, then copy what is left of `x` (negative padding cuts it) to its place."""
    result = rw.memory(value(rw.node))
    rw.call(aten.fill_.Scalar, result, fill)
    source, target = x, result
    for i in range(0, len(pad), 2):
        low, high = pad[i], pad[i + 1]
        dim = value(x).dim() - 1 - i // 2
        size = value(x).shape[dim]
        source = rw.call(aten.slice.Tensor, source, dim, max(-low, 0), size - max(-high, 0))
        target = rw.call(aten.slice.Tensor, target, dim, max(low, 0), max(low, 0) + value(source).shape[dim])
    rw.call(aten.copy_.default, target, source)
    return result


def _then_in_place(target: Any) -> Rule:
    """Return the rule for masked_fill, index_put and others: a copy, then the op in place."""

    def rule(rw: Rewriter, x: fx.Node, *args: Any, **kwargs: Any) -> fx.Node | None:
        """Copy `x`, then run the op in place on the copy."""
        if value(x).shape != value(rw.node).shape:
            return None  # masked_fill broadcasts its input
        result = copied(rw, x)
        rw.call(target, result, *args, **kwargs)
        return result

    return rule


def _overwrite(rw: Rewriter, x: fx.Node, source: fx.Node, *_: Any) -> fx.Node:
    """Lower `copy`: the layout of its first argument with the numbers of its second.

    Where a slice is written, that layout may have large gaps; the write converts and repeats the numbers itself.
    """
    is_written = all(user.target in SLICES and user.args[0] is not rw.node for user in rw.node.users)
    return source if is_written and rw.written.isdisjoint(keys_of(source)) else copied(rw, source)


def _filled_with(fill: float) -> Rule:
    """Return the rule for an op whose result is filled with one number."""

    def rule(rw: Rewriter, *_: Any, **__: Any) -> fx.Node:
        """Fill the result."""
        result = rw.memory(value(rw.node))
        rw.call(aten.fill_.Scalar, result, fill)
        return result

    return rule


def _filled_by(position: int) -> Rule:
    """Return the rule for an op whose result is filled with the number at a position among its arguments."""
    return lambda rw, *args, **_: _filled_with(args[position])(rw)


def _arange(rw: Rewriter, *bounds: float, **_: Any) -> fx.Node:
    """Write the range with the `out=` kernel."""
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    result = rw.memory(value(rw.node))
    rw.call(aten.arange.start_out, start, end, step, out=result)
    return result


RULES: dict[Any, Rule] = {
    aten._safe_softmax.default: safe_softmax,
    aten.copy.default: _overwrite,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.mul.Scalar: _as_tensor_op(aten.mul.Tensor),
    aten.div.Scalar: _as_tensor_op(aten.div.Tensor),
    aten.add.Scalar: _as_tensor_op(aten.add.Tensor),
    aten.sub.Scalar: _as_tensor_op(aten.sub.Tensor),
    aten.relu.default: _relu,
    aten.sum.default: _sum,
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.native_dropout.default: dropout,
    aten.native_dropout_backward.default: dropout_backward,
    aten.mse_loss.default: mse_loss,
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.slice_backward.default: _scattered_into_zeros(aten.slice.Tensor),
    aten.select_backward.default: _scattered_into_zeros(aten.select.int),
    **{target: _scatter(view) for target, view in SLICES.items()},
    aten.constant_pad_nd.default: _pad,
    aten.masked_fill.Scalar: _then_in_place(aten.masked_fill_.Scalar),
    aten.masked_fill.Tensor: _then_in_place(aten.masked_fill_.Tensor),
    aten.index_put.default: _then_in_place(aten.index_put_.default),
    aten.index_add.default: _then_in_place(aten.index_add_.default),
    aten.index_copy.default: _then_in_place(aten.index_copy_.default),
    aten.index_fill.int_Scalar: _then_in_place(aten.index_fill_.int_Scalar),
    aten.scatter.src: _then_in_place(aten.scatter_.src),
    aten.scatter.value: _then_in_place(aten.scatter_.value),
    aten.scatter_add.default: _then_in_place(aten.scatter_add_.default),
    aten.zeros.default: _filled_with(0),
    aten.ones.default: _filled_with(1),
    aten.zeros_like.default: _filled_with(0),
    aten.ones_like.default: _filled_with(1),
    aten.new_zeros.default: _filled_with(0),
    aten.new_ones.default: _filled_with(1),
    aten.full.default: _filled_by(1),
    aten.full_like.default: _filled_by(1),
    aten.new_full.default: _filled_by(2),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.scalar_tensor.default: _filled_by(0),
    aten.lift_fresh_copy.default: _copy,
}
