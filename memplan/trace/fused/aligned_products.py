"""Pads the operands of matrix products to what tensor cores take, where they are made.

A GPU multiplies half-precision matrices at full speed if their rows begin at multiples of 16 bytes. A vocabulary of
50,257 words is none, and then the head of GPT-2 takes twice the time. Inductor's own pass (`pad_mm`) pads a product by
copies of its operands, if a benchmark on the device says so: one more tensor of the size of the logits for each use.

Here a tensor is padded once, for all products that take it, by the kernel that makes it. So nothing is copied, the
padded gradient of the logits may lie over the padded logits, and the same is planned with and without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.trace.chunking.rows import FULL
from memplan.trace.fused.early_gradients import EARLY
from memplan.trace.fused.row_parts import BLOCK, NAMED, PERMUTE, PRODUCTS
from memplan.trace.passes.partitions import TAG
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, value

_ROW = 16  # bytes: what rows have to be multiples of
_LEAST = 128  # of each side of a product: below, its time is that of its operands' bytes
_HALF = (torch.bfloat16, torch.float16)
_SLICE, _STRIDED = aten.slice.Tensor, aten.as_strided.default
_CONVERTING = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
_MADE_OF = VIEWS | {PERMUTE, _SLICE}


def align_products(graph: fx.Graph) -> int:
    """Pad what large half-precision products take, so that all their rows are aligned.

    Args:
        graph: A joint graph of ATen ops, which is changed. Products keep their numbers, but for rounding.

    Returns:
        The number of products that were padded.

    Example:
        >>> align_products(joint.graph)
        3
    """
    padder, found = _Padder(graph), 0
    for node in list(graph.nodes):
        if node.target in PRODUCTS and _is_large(node):
            found += padder.align(node)
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return found


def _is_large(node: fx.Node) -> bool:
    """Return whether a product is of half precision, and takes longer than reading its operands does."""
    left, right = (value(x) for x in _operands(node))
    return left.dtype in _HALF and left.dtype == right.dtype and min(*left.shape, *right.shape) >= _LEAST


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = node.args[-2:]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return left, right


class _Padder:
    """Pads the tensors of one graph, each once. `padded`: what was made of a node, by its padded dimension."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._mode = graph, fake_mode_of(graph)
        self._padded: dict[tuple[fx.Node, int], fx.Node] = {}

    def align(self, node: fx.Node) -> bool:
        """Pad one product, and return whether there was something to pad."""
        left, right = _operands(node)
        if any(map(_is_seen_by_strides, (node, left, right))):
            return False
        rows, inner = value(left).shape
        columns = value(right).shape[1]
        made = value(node)
        # a row of a matrix in memory runs along the dimension of stride 1: its size is that between rows
        rows_to = _aligned(rows, made) if value(left).stride(0) == 1 else rows
        columns_to = columns if _is_returned(node) else _aligned(columns, made)
        along = value(left).stride(1) == 1 or value(right).stride(0) == 1
        inner_to = _aligned(inner, made) if along else inner
        if (rows_to, inner_to, columns_to) == (rows, inner, columns):
            return False
        left = self._to(self._to(left, 0, rows_to), 1, inner_to)
        right = self._to(self._to(right, 0, inner_to), 1, columns_to)
        added = [self._added(x, (rows_to, columns_to), made) for x in node.args[:-2]]
        writer = Rewriter(self._graph, self._mode, node)
        result = self._named(writer.call(node.target, *added, left, right, **node.kwargs), node)
        result.meta.update({key: node.meta[key] for key in (TAG, EARLY) if key in node.meta})
        for dim, (before, after) in enumerate(((rows, rows_to), (columns, columns_to))):
            if before != after:
                whole, result = result, self._named(writer.call(_SLICE, result, dim, 0, before), node)
                self._padded[result, dim] = whole  # by zeros: so are its operands
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)
        return True

    def _added(self, node: Any, shape: tuple[int, int], made: torch.Tensor) -> fx.Node:
        """Return what a product is added to, in its padded shape."""
        assert isinstance(node, fx.Node)
        found, sizes = node, value(node).shape
        if not sizes:  # one number for all
            return found
        for dim, (before, after) in enumerate(zip(made.shape[-len(sizes) :], shape[-len(sizes) :], strict=True)):
            if sizes[dim] == before:
                found = self._to(found, dim, after)
        return found

    def _to(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        """Return a node padded to a size in one dimension: the same one for each product."""
        if value(node).shape[dim] == size:
            return node
        known = self._padded.get((node, dim))
        return self._pad(node, dim, size) if known is None else known

    def _pad(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        val, writer = value(node), Rewriter(self._graph, self._mode, node, before=node.next)
        shape, source = list(val.shape), node.args[0] if node.args else None
        shape[dim] = size
        if node.target is PERMUTE and isinstance(source, fx.Node):
            dims: Any = node.args[1]
            made = writer.call(PERMUTE, self._to(source, dims[dim], size), dims)
        elif node.target in VIEWS and isinstance(source, fx.Node) and _is_last_of_both(source, node, dim):
            made = writer.call(aten.view.default, self._to(source, value(source).dim() - 1, size), shape)
        elif node.target in _CONVERTING and isinstance(source, fx.Node):
            made = writer.call(node.target, self._to(source, dim, size), *node.args[1:], **node.kwargs)
        elif (among := _among_zeros(node)) is not None:  # both at once: Inductor writes one kernel
            inner, along, begin, end = among
            amounts = [[0, 0] for _ in shape]
            amounts[along] = [begin, val.shape[along] - end]
            amounts[dim][1] += size - val.shape[dim]
            made = writer.call(
                aten.constant_pad_nd.default, inner, [n for pair in reversed(amounts) for n in pair], 0.0
            )
        else:
            # not by `constant_pad_nd`, which newer Inductors write as two kernels
            zeros = self._named(writer.call(FULL, shape, 0.0, dtype=val.dtype, device=val.device), node)
            made = writer.call(aten.slice_scatter.default, zeros, node, dim, 0, val.shape[dim])
        self._named(made, node)
        self._padded[node, dim] = made
        readers = [user for user in node.users if user is not made and user.target not in _MADE_OF]
        if node.op != "placeholder" and readers and made.target is not PERMUTE:
            writer = Rewriter(self._graph, self._mode, node, before=made.next)
            part = self._named(writer.call(_SLICE, made, dim, 0, val.shape[dim]), node)
            for user in readers:
                if user.target not in PRODUCTS and user.target is not _STRIDED and user.op != "output":
                    user.replace_input_with(node, part)
        return made

    def _named(self, made: fx.Node, node: fx.Node) -> fx.Node:
        """Return a new node, which Inductor names like another one, and which is of its block of rows; where the
        backward computes that one again, it does so with this one."""
        made.meta.update({key: node.meta[key] for key in (*NAMED, BLOCK) if key in node.meta})
        if node.meta.get(TAG) is CheckpointPolicy.MUST_RECOMPUTE:
            made.meta[TAG] = node.meta[TAG]
        return made


def _among_zeros(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return what a node puts among zeros, as the gradient of a slice does, and where: the dimension, begin and end.

    None for any other node.
    """
    if node.target is not aten.slice_scatter.default or node.kwargs or len(node.args) > 5:
        return None
    given: list[Any] = [*node.args, *(0, None, None)[len(node.args) - 2 :]]
    zeros, inner, dim, *ends = given
    plain = isinstance(zeros, fx.Node) and zeros.target is FULL and not zeros.args[1]
    if not plain or not isinstance(inner, fx.Node):
        return None
    along = dim % value(node).dim()
    begin, end, _ = slice(*ends).indices(value(node).shape[along])
    return inner, along, begin, end


def _aligned(size: int, like: torch.Tensor) -> int:
    step = _ROW // like.element_size()
    return -(-size // step) * step


def _is_last_of_both(source: fx.Node, node: fx.Node, dim: int) -> bool:
    """Return whether a dimension of a view is its last one, and that of what it is a view of."""
    before, after = value(source).shape, value(node).shape
    return dim == len(after) - 1 and bool(before) and before[-1] == after[-1] and value(source).is_contiguous()


def _is_returned(node: fx.Node) -> bool:
    """Return whether a result, or a view of it, leaves the graph: it has its own layout then."""
    return any(user.op == "output" for one in _views_of(node) for user in one.users)


def _is_seen_by_strides(node: fx.Node) -> bool:
    """Return whether something counts the bytes of a tensor's rows: a padded one has others."""
    return any(user.target is _STRIDED for one in _views_of(node) for user in one.users)


def _views_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and its views."""
    left: list[fx.Node] = [node]
    while left:
        one = left.pop()
        yield one
        left += [user for user in one.users if user.target in _MADE_OF]
