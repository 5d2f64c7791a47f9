"""Divide by rows for eager's kernels: chains around softmax and cross-entropy run block by block, with the same bits.

Each result of a chain that something else needs is made where it was, block by block, from what the chain reads. So the
chain's other tensors exist one block at a time, and the backward computes again what it needs of the forward's. Where
the gradient that leaves is laid out like the tensor that the chain starts from, and nothing else reads that, its rows
overwrite the rows of that tensor: logits and their gradient are one storage.

The ops listed here have kernels that give a row the same bits whatever other rows they process. Pointwise kernels of
transcendental functions do not: the last elements of a call go through scalar code. Nor do matrix products: only
Inductor's are divided (`fused/row_division.py`). The mean or sum of a cross-entropy is taken by the same kernel over
the same rows, each of which has its loss as its only class. It adds in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from memplan.core.division import Division
from memplan.trace.chunking.rows import (
    SLICE,
    BlockRewriter,
    Box,
    Chain,
    Finder,
    Parts,
    blocks_of,
    chosen,
    has_rows,
    is_plain,
    parts_if,
)
from memplan.trace.passes.nodes import is_view, keys_of, out_names, out_variant, tensors_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, recompute_views, storage_key, value

_COPIES = {aten.clone.default, aten._to_copy.default}
# Correctly rounded (IEEE 754), so that vector and scalar code agree.
_POINTWISE = {
    *(aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.add.Tensor, aten.neg.default, aten.abs.default),
    *(aten.mul.Scalar, aten.div.Scalar, aten.relu.default, aten.where.self, aten.maximum.default, aten.minimum.default),
    *(aten.threshold_backward.default, aten.masked_fill.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.eq.Scalar),
    *(aten.ge.Scalar, aten.le.Scalar, aten.ne.Scalar),
}
# Ops along one dimension, and the position of that dimension among their arguments.
_SLICES = {SLICE: 1, aten.slice_backward.default: 2}
_SOFTMAX = {
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
}
_NLL, _NLL_BACKWARD = aten.nll_loss_forward.default, aten.nll_loss_backward.default
_NOT_A_CLASS = -100  # torch's default for the class to ignore


def divide(graph: fx.Graph, division: Division) -> Division:
    """Divide the chains of a functional graph, in place, and return the division with `over` settled, to repeat it.

    Raises `InvalidSize` without a number of blocks.
    """
    blocks = blocks_of(division)
    finder = Finder(part_of=_part_of, trims={*VIEWS, SLICE})
    seeds = [node for node in graph.nodes if node.target in _SOFTMAX]
    found, over = chosen(division, list(finder.chains(graph, seeds)))
    for chain in found:
        _EagerBlocks(graph, chain, blocks).run()
    return replace(division, over=over)


def _part_of(node: fx.Node, n: int) -> Parts | None:
    """Return how an op can run on a block of `n` rows; None if it cannot."""
    if node.op != "call_function" or not is_plain(node):
        return None
    args, target = node.args, node.target
    tensors = tuple(a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor))
    if target is _NLL or target is _NLL_BACKWARD:
        return _loss(node, n)
    if target in _SLICES:
        dim: Any = args[_SLICES[target]] if len(args) > 1 else 0
        along = dim % value(node).dim() != 0
        return parts_if(along and has_rows(node, n) and has_rows(tensors[0], n), tensors)
    if not _by_rows(node, n):
        return None
    if target in VIEWS:
        return parts_if(_by_rows(tensors[0], n), tensors)
    if target in _COPIES:
        same = value(node).device == value(tensors[0]).device
        return parts_if(same and _fall_into_rows(tensors, n), tensors)
    if target in _POINTWISE:
        return _pointwise(node, n, tensors)
    if target in _SOFTMAX:
        dim, rank = args[_SOFTMAX[target]], value(node).dim()
        last = dim in (-1, rank - 1) and rank > 1 and value(node).shape[:-1].numel() % n == 0
        return parts_if(last and all(_by_rows(t, n) for t in tensors), tensors)
    return None


def _loss(node: fx.Node, n: int) -> Parts | None:
    """Return the parts of a cross-entropy without weights, over rows of classes."""
    shift = 0 if node.target is _NLL else 1
    x, target, weight, reduction = node.args[shift : shift + 4]
    fits = weight is None and reduction in (1, 2) and value(x).dim() == 2  # type: ignore[arg-type]
    by_rows = fits and _by_rows(x, n) and _by_rows(target, n)
    return parts_if(by_rows, (x, target), result=node.target is _NLL_BACKWARD)  # type: ignore[arg-type]


def _pointwise(node: fx.Node, n: int, tensors: tuple[fx.Node, ...]) -> Parts | None:
    """Return the parts of a pointwise op: operands of the result's shape come by rows, numbers come whole."""
    if (len(node.args) > 2 and node.target in (aten.add.Tensor, aten.sub.Tensor)) or node.kwargs:
        return None  # alpha: vector code may round the product and the sum once
    rows = tuple(t for t in tensors if value(t).shape == value(node).shape)
    fits = rows and all(value(t).dim() == 0 for t in tensors if t not in rows)
    return parts_if(fits and _fall_into_rows(rows, n), rows)


def _fall_into_rows(nodes: tuple[fx.Node, ...], n: int) -> bool:
    return all(has_rows(node, n) or _by_rows(node, n) for node in nodes)


def _by_rows(node: Any, n: int) -> bool:
    """Return whether a node is contiguous and falls into `n` rows."""
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(val, torch.Tensor) and val.is_contiguous() and val.numel() % n == 0


class _EagerBlocks(BlockRewriter):
    """Rewrites one chain of ops that eager's kernels run."""

    def __init__(self, graph: fx.Graph, chain: Chain, blocks: int) -> None:
        super().__init__(graph, chain, blocks)
        self.ours: set[fx.Node] = set()

    def run(self) -> None:
        """Replace the chain's nodes: each result that is needed whole is made where it was."""
        sinks = [node for node in self.chain.nodes if self.leaves(node)]
        for sink in sinks:
            self.anchor, self.phase = sink.next, sink.meta.get("partitioner_tag")
            self.made.clear()  # each computes its blocks again
            if sink.target is _NLL:
                self._reduced(sink)
            else:
                self._stored(sink, self._overwritten(sink) if sink is sinks[-1] else None)
        for node in reversed(self.chain.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def writer(self, node: fx.Node, box: Box | None) -> Rewriter:
        """Return a rewriter, whose nodes are noted."""
        writer = super().writer(node, box)
        writer.made = self.ours
        return writer

    def computed(self, node: fx.Node, box: Box) -> fx.Node:
        """Run a node of the chain on a block, whose copies are contiguous as the whole one is."""
        kwargs = {**node.kwargs, "memory_format": torch.contiguous_format} if node.target in _COPIES else node.kwargs
        return self.writer(node, box).call(node.target, *self.arguments(node, box), **kwargs)

    def arguments(self, node: fx.Node, box: Box) -> tuple[Any, ...]:
        """Return the arguments of a node for a block."""
        args, at = list(super().arguments(node, box)), _SOFTMAX.get(node.target)  # type: ignore[call-overload]
        if at is not None:
            args[at] = -1
        elif node.target is aten.slice_backward.default:
            args[1] = self.shape(node, box)
        return tuple(args)

    def _stored(self, sink: fx.Node, memory: fx.Node | None) -> None:
        """Write the blocks of a result into `memory`, or new one, and replace it by that."""
        old = value(sink)
        new = self.writer(sink, None).memory(old) if memory is None else memory
        if list(value(new).shape) != list(old.shape):
            new = self.writer(sink, None).call(aten.view.default, new, list(old.shape))
        variant = out_variant(sink.target)
        for box in self.boxes:
            args, rows = self.arguments(sink, box), self.sliced(new, box)
            key = storage_key(value(rows))
            apart = all(key not in keys_of(arg) for arg in args)
            if variant is not None and len(out_names(variant)) == 1 and apart and value(rows).is_contiguous():
                self.writer(sink, box).call(variant, *args, **{**sink.kwargs, out_names(variant)[0]: rows})
            else:
                self.writer(sink, box).call(aten.copy_.default, rows, self.block(sink, box))
        sink.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        if storage_key(value(new)) != storage_key(old):
            recompute_views(dict.fromkeys(new.users), storage_key(old), self.mode)

    def _reduced(self, sink: fx.Node) -> None:
        """Write the loss of each row, and reduce them by the sink's own kernel, each as the only class of its row."""
        given, target, _, reduction, ignored = sink.args
        x, plain = value(given), self.writer(sink, None)  # type: ignore[arg-type]
        with self.mode:
            like = [torch.empty(size, dtype=x.dtype, device=x.device) for size in ((x.shape[0],), ())]
        losses = plain.scratch(like[0])
        for box in self.boxes:
            rows = self.block(given, box), self.block(target, box)
            out = {"output": self.sliced(losses, box), "total_weight": plain.scratch(like[1])}
            self.writer(sink, box).call(aten.nll_loss_forward.output, *rows, None, 0, ignored, **out)
        column = plain.call(aten.view.default, plain.call(aten.neg.default, losses), [x.shape[0], 1])
        flags = plain.call(aten._to_copy.default, plain.call(aten.eq.Scalar, target, ignored), dtype=torch.int64)
        classes = plain.call(aten.mul.Tensor, flags, _NOT_A_CLASS)
        plain.label = f"{sink.name}_rows"
        sink.replace_all_uses_with(plain.making(value(sink), _NLL, column, classes, None, reduction, _NOT_A_CLASS))

    def _overwritten(self, sink: fx.Node) -> fx.Node | None:
        """Return the tensor whose rows the sink's rows may overwrite, or None: the chain reads it row by row, and
        nothing else does.
        """
        result, readers = value(sink), self.members | self.ours
        for x in self._read_by_backward(sink) if is_backward(sink) else ():
            given = value(x)
            same_elements = given.is_contiguous() and result.is_contiguous() and given.numel() == result.numel()
            same_kind = (given.dtype, given.device) == (result.dtype, result.device)
            if same_elements and same_kind and _only_read_by(readers, x):
                return x
        return None

    def _read_by_backward(self, sink: fx.Node) -> Iterator[fx.Node]:
        """Yield what the sink's blocks are made from and the forward made: it is alive in the backward anyway."""
        seen, todo = {sink}, [sink]
        while todo:
            for x in self.chain.part(todo.pop()).rows:
                if x not in self.members and not is_backward(x):
                    yield x
                elif x in self.members and x not in seen:
                    seen.add(x)
                    todo.append(x)


def _only_read_by(readers: set[fx.Node], tensor: fx.Node) -> bool:
    """Return whether an op made the tensor's bytes, and only `readers` read them, through views that hold all of them
    in the same order: so each row is where the tensor's is.
    """
    key = storage_key(value(tensor))
    outside = {n for n in tensor.graph.nodes if n not in readers and key in keys_of(n)}
    made = [n for n in outside if n.op != "call_function" or not is_view(n)]
    if len(made) != 1 or made[0].op != "call_function" or not isinstance(made[0].meta["val"], torch.Tensor):
        return False
    if not all(t.is_contiguous() and t.numel() == value(tensor).numel() for t in tensors_of([*outside])):
        return False
    return all(user in readers or user in outside for n in outside for user in n.users)
