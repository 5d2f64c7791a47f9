"""Lowering rules: ops without a true `out=` kernel, rewritten into ops that write into given memory.

Each rule replaces one node by memory without a kernel (`empty_strided`) and kernels that fill it, with the same bits.
An op that has neither an out variant nor a rule runs functionally and is reported as outside the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memplan.trace.lowering.layer_rules import (
    batch_norm,
    batch_norm_backward,
    copied,
    dropout,
    dropout_backward,
    embedding,
    embedding_backward,
    loss_of,
    mse_loss,
    safe_softmax,
)
from memplan.trace.passes.aliasing import keys_of, written_in
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value
from memplan.trace.passes.simplify import SLICES

_ROLLED = 2  # the most dimensions: three would make eight pieces
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


def _slice_backward(rw: Rewriter, grad: fx.Node, sizes: Any, *where: Any) -> fx.Node:
    """Write the gradient into a slice of zeros."""
    return _scatter_into_zeros(rw, grad, aten.slice.Tensor, *where)


def _select_backward(rw: Rewriter, grad: fx.Node, sizes: Any, dim: int, index: int) -> fx.Node:
    """Write the gradient into one index of zeros."""
    return _scatter_into_zeros(rw, grad, aten.select.int, dim, index)


def _scatter_into_zeros(rw: Rewriter, grad: fx.Node, view: Any, *where: Any) -> fx.Node:
    """Write the gradient into a view of zeros."""
    result = rw.memory(value(rw.node))
    rw.call(aten.zero_.default, result)
    rw.call(aten.copy_.default, rw.call(view, result, *where), grad)
    return result


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


def _roll(rw: Rewriter, x: fx.Node, shifts: list[int], dims: Any = ()) -> fx.Node | None:
    """Copy every piece to its new place: each dimension that is shifted cuts the tensor in two."""
    different = {dim % max(value(x).dim(), 1) for dim in dims}
    if not len(different) == len(dims) == len(shifts) <= _ROLLED or not value(x).numel():
        return None
    result = rw.memory(value(rw.node))
    pieces: list[tuple[fx.Node, fx.Node]] = [(x, result)]
    for shift, dim in zip(shifts, dims, strict=True):
        size = value(x).shape[dim]
        start = shift % size  # where the first element goes
        cuts = [((0, size - start), (start, size)), ((size - start, size), (0, start))] if start else []
        pieces = [
            (rw.call(aten.slice.Tensor, source, dim, *taken), rw.call(aten.slice.Tensor, target, dim, *put))
            for source, target in pieces
            for taken, put in cuts
        ] or pieces
    for source, target in pieces:
        rw.call(aten.copy_.default, target, source)
    return result


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


def _full(rw: Rewriter, _: Any, fill: Any, **__: Any) -> fx.Node:
    """Lower full and full_like: fill the result."""
    return _filled_with(fill)(rw)  # type: ignore[no-any-return]


def _new_full(rw: Rewriter, _: Any, __: Any, fill: Any, **___: Any) -> fx.Node:
    """Lower new_full: fill the result."""
    return _filled_with(fill)(rw)  # type: ignore[no-any-return]


def _arange(rw: Rewriter, *bounds: float, **_: Any) -> fx.Node:
    """Write the range with the `out=` kernel."""
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
    result = rw.memory(value(rw.node))
    rw.call(aten.arange.start_out, start, end, step, out=result)
    return result


def _scalar_tensor(rw: Rewriter, fill: Any, **_: Any) -> fx.Node:
    """Lower scalar_tensor: fill the result."""
    return _filled_with(fill)(rw)  # type: ignore[no-any-return]


RULES: dict[Any, Rule] = {
    aten._safe_softmax.default: safe_softmax,
    aten.roll.default: _roll,
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
    aten.huber_loss.default: loss_of(aten.huber_loss.default),
    aten.smooth_l1_loss.default: loss_of(aten.smooth_l1_loss.default),
    aten.soft_margin_loss.default: loss_of(aten.soft_margin_loss.default),
    aten._native_batch_norm_legit_functional.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
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
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: _new_full,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.scalar_tensor.default: _scalar_tensor,
    aten.lift_fresh_copy.default: _copy,
}
