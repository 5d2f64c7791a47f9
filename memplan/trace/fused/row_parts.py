"""The ops of a decomposed graph that can run on a block of rows.

Here, a tensor has `n` rows only if its first dimension is a multiple of `n`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from memplan.trace.chunking.rows import FULL, SLICE, Parts, has_rows, is_plain, is_transpose, parts_if
from memplan.trace.passes.rewrite import VIEWS, aten, value

BLOCK = "memplan_block"  # in the meta of a node: the number of its chain, and the block of rows that it computes
NAMED = ("original_aten", "seq_nr")  # in the meta of a node: what Inductor names its kernels by, and partitions by
_ZEROS: dict[object, int] = {FULL: 1, aten.scalar_tensor.default: 0}  # and the position of the number
PERMUTE, SUM = aten.permute.default, aten.sum.dim_IntList
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}  # and which argument has the rows
_COPIES = {aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_REDUCTIONS = {aten.amax.default, aten.amin.default, SUM, aten.mean.dim, aten.any.dim}
# Ops along one dimension, and the position of that dimension among their arguments.
_ALONG = {
    aten.gather.default: 1,
    aten.scatter.value: 1,
    aten.scatter.src: 1,
    aten.squeeze.dim: 1,
    aten.unsqueeze.default: 1,
    SLICE: 1,
    aten.slice_scatter.default: 2,
}


def names_of(node: fx.Node) -> dict[str, Any]:
    """Return the metadata of a node that what replaces it inherits: Inductor names and partitions kernels by it."""
    return {key: node.meta[key] for key in NAMED if key in node.meta}


def is_zero(arg: object) -> bool:
    """Return whether an operand is the number zero, or a tensor that is filled with it."""
    if not isinstance(arg, fx.Node):
        return arg == 0
    at = _ZEROS.get(arg.target)
    return at is not None and bool(arg.args[at] == 0)


def part_of(node: fx.Node, n: int) -> Parts | None:
    """Return how an op can run on a block of `n` rows; None if it cannot."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or not is_plain(node):
        return None
    if target in PRODUCTS:
        return _product(node, n)
    if target in _REDUCTIONS:
        return _reduction(node, n)
    if not has_rows(node, n):
        return None
    tensors = tuple(node.all_input_nodes)
    if any(isinstance(arg, fx.Node) for arg in node.kwargs.values()):
        return None
    if target is FULL:
        return Parts(())
    if target in VIEWS:
        return parts_if(has_rows(tensors[0], n) and value(tensors[0]).is_contiguous(), tensors)
    if target in _COPIES:
        return parts_if(has_rows(tensors[0], n), tensors)
    if target is PERMUTE:
        return parts_if(node.args[1][0] == 0, tensors)  # type: ignore[index]
    if target in _ALONG:
        at = _ALONG[target]
        dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
        rank = max(value(node).dim(), value(tensors[0]).dim())
        same = all(has_rows(t, n) and value(t).shape[0] == value(node).shape[0] for t in tensors)
        return parts_if(isinstance(dim, int) and dim % rank != 0 and same, tensors)
    if torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags:
        return _pointwise(node, n, tensors)
    return None


def _product(node: fx.Node, n: int) -> Parts | None:
    """Return the part of a matrix product: by rows, or a sum over the rows of two tensors."""
    at = PRODUCTS[node.target]  # type: ignore[index]
    if len(node.args) != 2 + at or node.kwargs:
        return None
    x, y = node.args[at:]
    if at == 0 and is_transpose(x) and has_rows(x.args[0], n) and has_rows(y, n):  # type: ignore[union-attr]
        return Parts((x.args[0], y), result=False)  # type: ignore[union-attr, arg-type]
    if at and value(node.args[0]).dim() != 1:  # type: ignore[arg-type]
        return None
    return parts_if(x is not y and has_rows(x, n) and has_rows(node, n), (x,))  # type: ignore[arg-type]


def _reduction(node: fx.Node, n: int) -> Parts | None:
    """Return the part of a reduction: of each row, or a sum over all rows."""
    x = node.args[0]
    if not has_rows(x, n):
        return None
    rank = value(x).dim()  # type: ignore[arg-type]
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or not dims:
        return None
    over = {dim % rank for dim in dims if isinstance(dim, int)}
    if 0 in over:
        return parts_if(node.target is SUM and over == {0} and not node.kwargs, (x,), result=False)  # type: ignore[arg-type]
    return parts_if(has_rows(node, n), (x,))  # type: ignore[arg-type]


def _pointwise(node: fx.Node, n: int, tensors: tuple[fx.Node, ...]) -> Parts | None:
    """Return the part of a pointwise op: operands with the rows of its result come by rows, the others are the same for
    each row.
    """
    shape = value(node).shape
    rows = tuple(t for t in tensors if value(t).dim() == len(shape) and value(t).shape[0] == shape[0])
    return parts_if(bool(rows) and all(has_rows(t, n) for t in rows), rows)
