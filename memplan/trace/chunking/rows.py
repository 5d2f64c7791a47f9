"""The ops that treat the rows of a tensor independently.

A tensor of `n` rows is any tensor whose elements, in order, fall into `n` equal runs: a row is what an op does not
cross. The ops listed here have kernels that give a row the same bits whatever other rows they process. Pointwise
kernels of transcendental functions do not: the last elements of a call go through scalar code. Matrix products do not
either: they are divided only on request (`sums`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.rewrite import aten, value

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
COPIES = {aten.clone.default, aten._to_copy.default}
# Correctly rounded (IEEE 754), so that vector and scalar code agree.
_POINTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.add.Tensor, aten.neg.default, aten.abs.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.relu.default, aten.where.self, aten.maximum.default, aten.minimum.default),
    *(aten.threshold_backward.default, aten.masked_fill.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.eq.Scalar),
    *(aten.ge.Scalar, aten.le.Scalar, aten.ne.Scalar),
}
SOFTMAX = {aten._softmax.default, aten._log_softmax.default}
SOFTMAX_BACKWARD = {aten._softmax_backward_data.default, aten._log_softmax_backward_data.default}
NLL, NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
SLICE, SLICE_BACKWARD, TRANSPOSE = aten.slice.Tensor, aten.slice_backward.default, aten.t.default
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # and which argument has the rows
SUM = aten.sum.dim_IntList


@dataclass(frozen=True, slots=True)
class Parts:
    """The part of one op in a chain: which operands come by rows, and whether its result does."""

    rows: tuple[fx.Node, ...]
    result: bool = True


def block_shape(shape: torch.Size, n: int, rows: int) -> list[int]:
    """Return the shape of `rows` of the `n` rows of a tensor: leading dimensions are merged until they hold them."""
    for d in range(1, len(shape) + 1):
        if prod(shape[:d]) % n == 0:
            return [prod(shape[:d]) // n * rows, *shape[d:]]
    raise AssertionError(f"a tensor of shape {list(shape)} has no {n} rows")


def parts(node: fx.Node, n: int, *, sums: bool) -> Parts | None:
    """Return how `node` takes part in a chain of `n` rows; None if it does not."""
    if node.op != "call_function" or not _is_dense_strided(node):
        return None
    args, target = node.args, node.target
    tensors = tuple(a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor))
    if target in VIEWS:
        return _parts_if(_by_rows(node, n) and _by_rows(tensors[0], n), tensors)
    if target in COPIES:
        rows = has_rows(tensors[0], n) or _has_lead(tensors[0], n)
        return _parts_if(rows and _by_rows(node, n) and value(node).device == value(tensors[0]).device, tensors)
    if target in _POINTWISE:
        return _pointwise(node, n, tensors)
    if target in SOFTMAX | SOFTMAX_BACKWARD:
        dim, rank = args[1 if target in SOFTMAX else 2], value(node).dim()
        last = dim in (-1, rank - 1) and rank > 1 and value(node).shape[:-1].numel() % n == 0
        return _parts_if(last and all(_by_rows(t, n) for t in (node, *tensors)), tensors)
    if target is NLL or target is NLL_BACKWARD:
        return _loss(node, n)
    return _ends(node, n, sums=sums)


def _loss(node: fx.Node, n: int) -> Parts | None:
    """Return the parts of a cross-entropy without weights, over rows of classes."""
    shift = 0 if node.target is NLL else 1
    x, target, weight, reduction = node.args[shift : shift + 4]
    fits = weight is None and reduction in (1, 2) and value(x).dim() == 2  # type: ignore[arg-type]
    by_rows = fits and _by_rows(x, n) and _by_rows(target, n)  # type: ignore[arg-type]
    return _parts_if(by_rows, (x, target), result=node.target is NLL_BACKWARD)  # type: ignore[arg-type]


def _ends(node: fx.Node, n: int, *, sums: bool) -> Parts | None:
    """Return the parts of an op that cuts rows off or pads them; with `sums`, also of products and sums over rows."""
    args, target = node.args, node.target
    if target is SLICE_BACKWARD:
        grad, sizes, dim, _, _, step = args
        if sums:
            return _parts_if(dim >= 1 and sizes[0] == n and _by_rows(grad, n), (grad,))  # type: ignore[arg-type, operator, index]
        return _parts_if(step == 1 and _has_lead(grad, n), (grad,), result=False)  # type: ignore[arg-type]
    if not sums:
        return None
    if target is SLICE:
        x, dim = args[0], args[1] if len(args) > 1 else 0
        return _parts_if(dim >= 1 and value(x).shape[0] == n and _by_rows(x, n), (x,))  # type: ignore[arg-type, operator]
    if target is TRANSPOSE:
        return _parts_if(_by_rows(args[0], n) and value(args[0]).shape[0] % n == 0, (args[0],), result=False)  # type: ignore[arg-type]
    if target is SUM:
        fits = args[1] == [0] and not node.kwargs and value(args[0]).shape[0] % n == 0  # type: ignore[arg-type]
        return _parts_if(fits and _by_rows(args[0], n), (args[0],), result=False)  # type: ignore[arg-type]
    if target in PRODUCTS and (len(args) == 2 + PRODUCTS[target] and not node.kwargs):
        x, y = args[-2:]
        if x.target is TRANSPOSE and parts(x, n, sums=True) and _by_rows(y, n):  # type: ignore[union-attr, arg-type]
            whole = target is aten.mm.default and value(y).shape[0] % n == 0  # type: ignore[arg-type]
            return _parts_if(whole, (x, y), result=False)  # type: ignore[arg-type]
        return _parts_if(_by_rows(x, n) and _by_rows(node, n) and value(x).shape[0] % n == 0, (x,))  # type: ignore[arg-type]
    return None


def _pointwise(node: fx.Node, n: int, tensors: tuple[fx.Node, ...]) -> Parts | None:
    """Return the parts of a pointwise op: operands of the result's shape come by rows, numbers come whole."""
    if (len(node.args) > 2 and node.target in (aten.add.Tensor, aten.sub.Tensor)) or node.kwargs:
        return None  # alpha: vector code may round the product and the sum once
    rows = tuple(t for t in tensors if value(t).shape == value(node).shape)
    others = [t for t in tensors if t not in rows]
    fits = rows and all(value(t).dim() == 0 for t in others)
    return _parts_if(bool(fits) and _by_rows(node, n) and all(has_rows(t, n) for t in rows), rows)


def _parts_if(holds: Any, rows: tuple[fx.Node, ...], *, result: bool = True) -> Parts | None:
    """Return the parts if the condition holds, else None."""
    return Parts(rows, result) if holds else None


def _is_dense_strided(node: fx.Node) -> bool:
    """Return whether everything that a node takes and makes is a dense tensor or no tensor."""
    given = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat = [t for v in given for t in (v if isinstance(v, (tuple, list)) else (v,))]
    return all(t is None or isinstance(t, (torch.Tensor, int, float)) for t in flat) and all(
        t.layout is torch.strided and t.numel() for t in flat if isinstance(t, torch.Tensor)
    )


def _by_rows(node: fx.Node, n: int) -> bool:
    """Return whether a node is contiguous and falls into `n` rows."""
    return isinstance(node, fx.Node) and bool(value(node).is_contiguous() and value(node).numel() % n == 0)


def has_rows(node: fx.Node, n: int) -> bool:
    """Return whether a node falls into `n` rows, or has `n` as its first dimension."""
    return _by_rows(node, n) or value(node).shape[:1] == (n,)


def _has_lead(node: fx.Node, n: int) -> bool:
    """Return whether the first dimension, or the first two together, are `n` rows."""
    shape: torch.Size = value(node).shape
    return len(shape) >= 2 and (shape[0] == n or shape[:2].numel() == n)
