"""Divides the gradients of embeddings by rows of the table, beside a loss head that runs in blocks.

Inductor adds what belongs to a row of the table up in 32 bits, in a tensor of the whole table: of a Llama with 128,256
words, 1.05 GB at the end of the backward, where all other gradients are alive. Here such a tensor holds the rows of one
block at a time, and adds the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor import config

from memplan.trace.chunking.rows import FULL, SLICE
from memplan.trace.fused.row_parts import BLOCK, is_zero, names_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value

_PUT, _MASKED = aten.index_put.default, aten._unsafe_masked_index_put_accumulate.default
_CONVERT, _IOTA = torch.ops.prims.convert_element_type.default, torch.ops.prims.iota.default


def divide_row_sums(graph: fx.Graph, blocks: int, *, least: int, number: int) -> None:
    """Divide sums into the rows of a table, in place, where the sums have more than `least` bytes.

    `number` is that of the first of them among the chains of the graph.
    """
    mode = fake_mode_of(graph)
    # Inductor may join fewer parts by one kernel at the end, until which all of them exist.
    blocks = max(blocks, config.max_pointwise_cat_inputs + 1)
    for node in list(graph.nodes):
        if (sums := _sums(node)) is None or value(node).numel() * value(node).itemsize <= least:
            continue
        mask, rows, summands = sums
        converted = _only_user(node, _CONVERT)
        whole = _only_user(converted or node, aten.add.Tensor)
        if whole is not None and not all(
            isinstance(x, fx.Node) and value(x).shape == value(node).shape for x in whole.args
        ):
            whole = None
        last = whole or converted or node
        pieces = []
        count, *width = value(node).shape
        size = -(-count // blocks)
        kind = {"dtype": torch.int64, "device": value(node).device}
        firsts = Rewriter(graph, mode, node, before=last).call(
            _IOTA, -(-count // size), start=0, step=size, requires_grad=False, **kind
        )
        for k, low in enumerate(range(0, count, size)):
            high = min(low + size, count)
            writer = Rewriter(graph, mode, node, before=last)
            writer.label = f"{node.name}_words{k}"
            writer.also = {BLOCK: (number, k), **names_of(node)}
            behind = writer.call(aten.add.Tensor, rows, count)  # the rows that negative numbers name
            found = writer.call(aten.where.self, writer.call(aten.lt.Scalar, rows, 0), behind, rows)
            # Not a number but memory that holds it: so the blocks' kernels are the same, and compiled once.
            own = writer.call(aten.sub.Tensor, found, writer.call(aten.slice_copy.Tensor, firsts, 0, k, k + 1))
            inside = writer.call(aten.lt.Scalar, own, high - low)
            inside = writer.call(aten.bitwise_and.Tensor, inside, writer.call(aten.ge.Scalar, own, 0))
            for _ in range(value(summands).dim() - value(rows).dim()):
                inside = writer.call(aten.unsqueeze.default, inside, -1)
            inside = inside if mask is None else writer.call(aten.bitwise_and.Tensor, inside, mask)
            kind = {"dtype": value(node).dtype, "device": value(node).device}
            zeros = writer.call(FULL, [high - low, *width], 0, **kind)
            piece = writer.call(_MASKED, zeros, inside, [own], summands)
            if converted is not None:
                piece = writer.call(_CONVERT, piece, converted.args[1])
            if whole is not None:
                parts = [piece if x is (converted or node) else writer.call(SLICE, x, 0, low, high) for x in whole.args]
                piece = writer.call(aten.add.Tensor, *parts)
            pieces.append(piece)
        joined = Rewriter(graph, mode, last).call(aten.cat.default, pieces)
        last.replace_all_uses_with(joined)
        number += 1
    graph.eliminate_dead_code()


def _sums(node: fx.Node) -> tuple[fx.Node | None, Any, Any] | None:
    """Return the mask, the rows and the summands of a node that adds up rows of zeros, None for any other."""
    args: Any = node.args
    if not is_backward(node):
        return None
    if node.target is _MASKED:
        start, mask, rows, summands = args
    elif node.target is _PUT and args[3:] == (True,):
        (start, rows, summands), mask = args[:3], None
    else:
        return None
    zeros = isinstance(start, fx.Node) and is_zero(start)
    if not zeros or len(rows) != 1 or not isinstance(rows[0], fx.Node) or value(rows[0]).dtype is not torch.int64:
        return None
    return mask, rows[0], summands


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    """Return the user of a node if it is the only one, and of this target with no keywords."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target and not users[0].kwargs else None
