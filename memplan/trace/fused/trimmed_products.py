"""Trims rows before a matrix product instead of after it, where a loss head is divided by rows.

A model of language that predicts the next token may compute the logits of all tokens and leave out the last of each
sample (`logits[:, :-1]`), whose gradient is then padded with zeros. So the logits fall into as many equal parts as the
batch has samples, and no more. Rows of a product do not depend on each other: here what is multiplied is trimmed, and
what the backward multiplies is padded after it. Then each token is a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from memplan.trace.chunking.rows import FULL, SLICE, is_transpose
from memplan.trace.fused.row_parts import PERMUTE, PRODUCTS, SUM, is_zero, names_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, value

_SCATTER = aten.slice_scatter.default


def trim_products(graph: fx.Graph) -> None:
    """Trim what products of the forward multiply, and pad after products of the backward, in place."""
    for node in list(graph.nodes):
        if node.target is SLICE and not is_backward(node):
            _trim(graph, node)
        elif node.target is _SCATTER and is_backward(node):
            _pad_later(graph, node)
    graph.eliminate_dead_code()


def _trim(graph: fx.Graph, cut: fx.Node) -> None:
    """Replace a slice of a product's rows by a product of fewer rows."""
    whole: Any = cut.args[0]
    product: Any = whole.args[0] if whole.target in VIEWS else whole
    at = PRODUCTS.get(product.target) if isinstance(product.target, OpOverload) else None
    alone = {*product.users} | {*whole.users} <= {whole, cut} and not product.kwargs
    if at is None or not alone or not _leaves_rows_out(cut, whole) or not _are_rows(whole, product):
        return
    if at and value(product.args[0]).dim() != 1:  # it adds a row to each
        return
    call = _caller(graph, cut)
    rows = _trimmed(call, product.args[at], value(whole).shape[:-1], cut.args[1:])
    made = call(product.target, *product.args[:at], rows, *product.args[at + 1 :])
    _flatten(cut, made)
    cut.replace_all_uses_with(call(aten.view.default, made, list(value(cut).shape)))


def _flatten(tensor: fx.Node, rows: fx.Node) -> None:
    """Let what reads the rows of a tensor as a matrix, through views and copies, read that matrix itself."""
    for user in list(tensor.users):
        if user.target in VIEWS and value(user).shape == value(rows).shape:
            user.replace_all_uses_with(rows)
        elif user.target in VIEWS or user.target is aten.clone.default:
            _flatten(user, rows)


def _pad_later(graph: fx.Graph, padded: fx.Node) -> None:
    """Replace the products of a gradient that is padded with rows of zeros by products of its own rows."""
    zeros: Any
    own: Any
    zeros, own, *where = padded.args
    views = [user for user in padded.users if user.target in VIEWS] or [padded]
    readers = [user for view in views for user in view.users]
    matrix = views[0]
    simple = len(views) == 1 and {*padded.users} <= {matrix, *readers} and value(matrix).dim() == 2
    empty = isinstance(zeros, fx.Node) and is_zero(zeros) and _are_rows(padded, matrix)
    if not (simple and empty and _leaves_rows_out(padded, padded) and all(_is_read(user, matrix) for user in readers)):
        return
    call = _caller(graph, padded)
    shape, width = value(padded).shape[:-1], value(matrix).shape[-1]
    if own.target in VIEWS and value(own.args[0]).shape == (value(own).shape[:-1].numel(), width):
        rows = own.args[0]
    else:
        if not value(own).is_contiguous():
            own = call(aten.clone.default, own, memory_format=torch.contiguous_format)
        rows = call(aten.view.default, own, [-1, width])
    for user in readers:
        if is_transpose(user):
            for product in list(user.users):
                call = _caller(graph, product)
                other = _trimmed(call, product.args[1], shape, where)
                product.replace_all_uses_with(call(product.target, call(PERMUTE, rows, [1, 0]), other))
            continue
        call = _caller(graph, user)
        if user.target is SUM:
            user.replace_all_uses_with(call(SUM, rows, *user.args[1:]))
        else:
            made = call(user.target, rows, user.args[1])
            made = call(aten.view.default, made, [*value(own).shape[:-1], -1])
            kind = {"dtype": value(made).dtype, "device": value(made).device}
            full = call(FULL, [*shape, value(user).shape[-1]], 0, **kind)
            scattered = call(_SCATTER, full, made, *where)
            user.replace_all_uses_with(call(aten.view.default, scattered, list(value(user).shape)))


def _is_read(user: fx.Node, matrix: fx.Node) -> bool:
    """Return whether a node is a product of a matrix, of its transpose, or the sum of its rows."""
    if is_transpose(user):
        return all(
            one.target is aten.mm.default and one.args[0] is user and one.args[1] is not user for one in user.users
        )
    if user.target is SUM:
        return user.args[1] == [0] and not user.kwargs
    return user.target is aten.mm.default and user.args[0] is matrix and user.args[1] is not matrix


def _are_rows(tensor: fx.Node, matrix: fx.Node) -> bool:
    """Return whether the last dimension of a tensor is a row of a matrix."""
    return bool(value(tensor).shape[-1] == value(matrix).shape[-1])


def _leaves_rows_out(node: fx.Node, whole: Any) -> bool:
    """Return whether a slice, or what it is scattered into, is one of whole rows without steps."""
    dim, *rest = node.args[2:] if node.target is _SCATTER else node.args[1:]
    left = value(node.args[1] if node.target is _SCATTER else node)  # type: ignore[arg-type]
    plain = len(rest) <= 2 and not node.kwargs and left.numel() > 0
    return plain and isinstance(dim, int) and 0 <= dim < value(whole).dim() - 1


def _trimmed(call: Callable[..., fx.Node], matrix: Any, shape: torch.Size, where: Any) -> fx.Node:
    """Return the rows of a matrix that a slice of them, in a tensor of this shape before its last dimension, leaves."""
    width = value(matrix).shape[-1]
    rows = call(SLICE, call(aten.view.default, matrix, [*shape, width]), *where)
    return call(aten.view.default, call(aten.clone.default, rows, memory_format=torch.contiguous_format), [-1, width])


def _caller(graph: fx.Graph, node: fx.Node) -> Callable[..., fx.Node]:
    """Return what adds calls before a node, with its origin."""
    writer = Rewriter(graph, fake_mode_of(graph), node)
    writer.also = names_of(node)
    return writer.call
