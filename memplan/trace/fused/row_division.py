"""Divide a joint graph by rows before Inductor generates its kernels (`divide=`).

A chain begins with a wide matrix product of the forward, as that of a loss head, and goes on to what is computed from
it by rows. The graph stays functional: the rows of what the chain reads are sliced, its ops run once for each block,
results that are needed whole are joined, and gradients of weights are added up. The forward saves no wide block: the
backward computes each again, so that the chain's wide tensors exist one block at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.core.division import Division
from memplan.trace.chunking.rows import BlockRewriter, Box, Chain, Finder, blocks_of, chosen
from memplan.trace.fused.early_gradients import compute_gradients_early
from memplan.trace.fused.row_parts import BLOCK, PRODUCTS, names_of, part_of
from memplan.trace.fused.row_sums import divide_row_sums
from memplan.trace.fused.trimmed_products import trim_products
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.partitions import TAG
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, value

_log = logging.getLogger("memplan")


def divide_rows(graph: fx.Graph, division: Division) -> Division:
    """Divide the chains of a joint graph, in place, and return the division with `over` settled, to repeat it.

    `over` is `NOTHING` if there was nothing to divide. Raises `InvalidSize` without a number of blocks.
    """
    blocks = blocks_of(division)
    trim_products(graph)
    seeds = [node for node in graph.nodes if node.target in PRODUCTS and not is_backward(node)]
    found = list(Finder(part_of=part_of, ends=PRODUCTS, trained=True).chains(graph, seeds))
    if not found:
        _log.info("there is nothing to divide into blocks of rows")
    found, over = chosen(division, found)
    products = [value(node) for chain in found for node in chain.nodes if node.target in PRODUCTS]
    widest = max((product.numel() * product.itemsize for product in products), default=0)
    for number, chain in enumerate(found):
        _FusedBlocks(graph, chain, blocks, number).run()
    compute_gradients_early(graph)
    if found:
        divide_row_sums(graph, blocks, least=widest // blocks, number=len(found))
    return replace(division, over=over)


class _FusedBlocks(BlockRewriter):
    """Rewrites one chain of ops that Inductor's kernels run. `number`: that of the chain."""

    def __init__(self, graph: fx.Graph, chain: Chain, blocks: int, number: int) -> None:
        super().__init__(graph, chain, blocks)
        self.number = number

    def run(self) -> None:
        """Replace the chain's nodes: each result that is needed whole is made where it was."""
        for node in self.chain.nodes:
            if self.leaves(node):
                self.anchor = node.next
                self.whole[node] = self._joined(node) if self.chain.part(node).result else self._added(node)
        for node, new in self.whole.items():
            node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code()

    def writer(self, node: fx.Node, box: Box | None) -> Rewriter:
        """Return a rewriter, whose nodes Inductor names as it would those that they replace."""
        writer = super().writer(node, box)
        also: Mapping[str, Any] = names_of(node)
        writer.also = also if box is None else {**also, BLOCK: (self.number, self.boxes.index(box))}
        return writer

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return the whole result of a node."""
        return self.writer(node, None).call(aten.cat.default, [self.block(node, box) for box in self.boxes])

    def _added(self, node: fx.Node) -> fx.Node:
        """Return a sum over rows: that of the first block, to which those of the others are added."""
        total: fx.Node | None = None
        for box in self.boxes:
            writer = self.writer(node, box)
            if node.target not in PRODUCTS:
                new = writer.call(node.target, self.block(node.args[0], box), *node.args[1:])
                total = new if total is None else writer.call(aten.add.Tensor, total, new)
                continue
            transposed, other = node.args
            rows = self.block(transposed.args[0], box)  # type: ignore[union-attr]
            x, y = self.writer(transposed, box).call(transposed.target, rows, [1, 0]), self.block(other, box)  # type: ignore[union-attr, arg-type]
            total = writer.call(node.target, x, y) if total is None else writer.call(aten.addmm.default, total, x, y)
        assert total is not None
        return total

    def sliced(self, node: fx.Node, box: Box) -> fx.Node:
        """Return the rows of a whole tensor, which the backward takes again: a view, or a copy of numbers by rows.

        Copies begin where their memory does, so that the blocks' kernels are the same: compiled once, not for each.
        """
        narrow = value(node).numel() == self.chain.n
        if narrow and (part := part_of(node, self.chain.n)) is not None and part.result and part.rows:
            return self.computed(node, box)
        new = super().sliced(node, box)
        if narrow and not value(node).is_floating_point():
            new.target = aten.slice_copy.Tensor
        if not is_backward(node):
            new.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        return new

    def computed(self, node: fx.Node, box: Box) -> fx.Node:
        """Run a node of the chain on a block; the backward computes wide ones again."""
        new = super().computed(node, box)
        small = value(node).numel() < self.chain.wide and node.target not in VIEWS
        if not is_backward(node) and not small:
            new.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        return new
