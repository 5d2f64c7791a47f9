"""Divide a joint graph by rows before Inductor generates its kernels (`divide=`).

A chain begins with a wide matrix product of the forward, as that of a loss head, and goes on to what is computed from
it by rows. The graph stays functional: the rows of what the chain reads are sliced, its ops run once for each block,
results that are needed whole are joined, and gradients of weights are added up. The forward saves no wide block: the
backward computes each again, so that the chain's wide tensors exist one block at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.core.division import NOTHING, Division
from memplan.errors import InvalidSize
from memplan.trace.chunking.rows import Box, Parts, bytes_touched
from memplan.trace.fused.early_gradients import compute_gradients_early
from memplan.trace.fused.row_parts import BLOCK, FULL, NAMED, PRODUCTS, is_transpose, part_of
from memplan.trace.fused.sums import scatter_into_summands, sum_products
from memplan.trace.passes.nodes import keys_of, tensors_of, written_in
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.partitions import TAG
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, value

_log = logging.getLogger("memplan")
_SLICE, _CAT = aten.slice.Tensor, aten.cat.default
_FEWEST = 2  # rows of a chain
_PART = 2  # a tensor is wide if it has at least one in so many of the elements of the first product of its chain


def divide_rows(graph: fx.Graph, division: Division) -> Division:
    """Divide the chains of a joint graph, in place, and return the division with `over` settled, to repeat it.

    A chain of fewer rows is divided into as many blocks as it has rows. With one block, only sums are rewritten.
    `over` is `NOTHING` if there was nothing to divide. Raises `InvalidSize` without a number of blocks.
    """
    if division.blocks is None:
        raise InvalidSize("no number of blocks was chosen", where="divide", hint="pass one")
    over = division.over
    divided = division.blocks == 1
    if division.blocks > 1:
        found = list(_chains(graph))
        if not found:
            _log.info("there is nothing to divide into blocks of rows")
        if over is None:
            over = max((chain.need for chain in found), default=NOTHING + 1) - 1
        for i, chain in enumerate(found):
            if chain.need > over:
                _BlockRewriter(graph, chain, i, min(division.blocks, chain.n)).run()
                divided = True
        compute_gradients_early(graph)
    if divided and division.sums:
        sum_products(graph)
        scatter_into_summands(graph)
    return replace(division, over=over)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Nodes in graph order that run block by block of `n` rows. `wide`: the elements of a wide tensor of theirs.

    `need`: the most bytes that one of them reads and writes.
    """

    nodes: tuple[fx.Node, ...]
    n: int
    wide: int
    need: int

    def part(self, node: fx.Node) -> Parts:
        """Return how a node of the chain takes part in it."""
        found = part_of(node, self.n)
        assert found is not None
        return found


def _chains(graph: fx.Graph) -> Iterator[_Chain]:
    """Yield chains that can be divided, disjoint, those with the widest products first."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    written = written_in(graph)
    seeds = [node for node in graph.nodes if node.target in PRODUCTS and not is_backward(node)]
    taken: set[fx.Node] = set()
    for seed in sorted(seeds, key=lambda node: (-value(node).numel(), place[node])):
        if seed in taken:
            continue
        nodes, n = _reach(seed, value(seed).shape[0] if value(seed).dim() else 1)
        changed = any(written & keys_of([node, *node.all_input_nodes]) for node in nodes)
        if n < _FEWEST or nodes & taken or changed or not any(map(is_backward, nodes)):
            continue
        taken |= nodes
        ordered = tuple(sorted(nodes, key=place.__getitem__))
        yield _Chain(nodes=ordered, n=n, wide=value(seed).numel() // _PART, need=max(map(bytes_touched, ordered)))


def _reach(seed: fx.Node, n: int) -> tuple[set[fx.Node], int]:
    """Return all nodes that are joined to a product by tensors of `n` rows, or of fewer if wide tensors have fewer.

    Other products end the chain. What a wide tensor is made from joins it, if that is wide too.
    """
    while n > 1:
        found = _reach_with(seed, n)
        if isinstance(found, set):
            return found, n
        n = found
    return set(), 1


def _reach_with(seed: fx.Node, n: int) -> set[fx.Node] | int:
    """Return the nodes of a chain of `n` rows, or a smaller number of rows, with which it goes further."""
    if part_of(seed, n) is None:
        return set()
    wide = value(seed).numel() // _PART
    nodes, todo = {seed}, [seed]
    while todo:
        node = todo.pop()
        own = part_of(node, n)
        assert own is not None
        for near in _users(node) if own.result else ():
            found = part_of(near, n)
            if found is None or node not in found.rows:
                fewer = math.gcd(n, *(val.shape[0] for val in tensors_of((near,)) if val.numel() >= wide and val.dim()))
                if fewer < n and (other := part_of(near, fewer)) is not None and node in other.rows:
                    return fewer
            elif near not in nodes:
                nodes.add(near)
                if near.target not in PRODUCTS:
                    todo.append(near)
        for near in () if node.target in PRODUCTS else own.rows:
            made = part_of(near, n) if value(near).numel() >= wide else None
            if made is not None and made.result and near not in nodes:
                nodes.add(near)
                todo.append(near)
    return nodes


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the users of a node, and in place of its transpose the products of that."""
    for user in node.users:
        if is_transpose(user):
            yield from user.users
        else:
            yield user


class _BlockRewriter:
    """Rewrites one chain. `made[node, box]` is a block of a node's result, `whole[node]` the whole of it."""

    def __init__(self, graph: fx.Graph, chain: _Chain, number: int, blocks: int) -> None:
        self.graph, self.chain, self.number = graph, chain, number
        self.mode = fake_mode_of(graph)
        self.members = set(chain.nodes)
        cuts = [chain.n * i // blocks for i in range(blocks + 1)]
        self.boxes: list[Box] = list(pairwise(cuts))
        self.made: dict[tuple[fx.Node, Box], fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Replace the chain's nodes: each result that is needed whole is made where it was."""
        for node in self.chain.nodes:
            if self._leaves(node):
                self.anchor = node.next
                own = self.chain.part(node)
                self.whole[node] = self._joined(node) if own.result else self._added(node)
        for node, new in self.whole.items():
            node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code()

    def _leaves(self, node: fx.Node) -> bool:
        """Return whether something needs the whole result of a node."""
        if not self.chain.part(node).result:
            return True
        users = list(_users(node))
        return any(u not in self.members or node not in self.chain.part(u).rows for u in users)

    def _writer(self, node: fx.Node, box: Box | None) -> Rewriter:
        """Return a rewriter for a node, at the current position, whose nodes belong to one block of rows, if any."""
        writer = Rewriter(self.graph, self.mode, node, before=self.anchor)
        writer.also = {key: node.meta[key] for key in NAMED if key in node.meta}
        if box is not None:
            block = self.boxes.index(box)
            writer.also, writer.label = {**writer.also, BLOCK: (self.number, block)}, f"{node.name}_rows{block}"
        return writer

    def _joined(self, node: fx.Node) -> fx.Node:
        """Return the whole result of a node."""
        return self._writer(node, None).call(_CAT, [self._block(node, box) for box in self.boxes])

    def _added(self, node: fx.Node) -> fx.Node:
        """Return a sum over rows: that of the first block, to which those of the others are added."""
        total: fx.Node | None = None
        for box in self.boxes:
            writer = self._writer(node, box)
            if node.target not in PRODUCTS:
                new = writer.call(node.target, self._block(node.args[0], box), *node.args[1:])
                total = new if total is None else writer.call(aten.add.Tensor, total, new)
                continue
            transposed, other = node.args
            rows = self._block(transposed.args[0], box)  # type: ignore[union-attr]
            x, y = self._writer(transposed, box).call(transposed.target, rows, [1, 0]), self._block(other, box)  # type: ignore[union-attr, arg-type]
            total = writer.call(node.target, x, y) if total is None else writer.call(aten.addmm.default, total, x, y)
        assert total is not None
        return total

    def _block(self, node: Any, box: Box) -> fx.Node:
        """Return the rows `box` of a node's result: computed if the node is of the chain, else sliced."""
        key = node, box
        if key not in self.made:
            inside = node in self.members and self.chain.part(node).result
            self.made[key] = self._computed(node, box) if inside else self._sliced(node, box)
        return self.made[key]

    def _sliced(self, node: fx.Node, box: Box) -> fx.Node:
        whole = self.whole.get(node, node)
        each = value(node).shape[0] // self.chain.n
        new = self._writer(node, box).call(_SLICE, whole, 0, box[0] * each, box[1] * each)
        if not is_backward(node):
            new.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        return new

    def _computed(self, node: fx.Node, box: Box) -> fx.Node:
        """Run a node of the chain on a block."""
        own = self.chain.part(node)
        shape = [value(node).shape[0] // self.chain.n * (box[1] - box[0]), *value(node).shape[1:]]
        args = tuple(self._argument(arg, own, box) for arg in node.args)
        if node.target in VIEWS and len(args) > 1:
            args = (args[0], shape)
        elif node.target is FULL:
            args = (shape, *args[1:])
        new = self._writer(node, box).call(node.target, *args, **node.kwargs)
        small = value(node).numel() < self.chain.wide and node.target not in VIEWS
        if not is_backward(node) and not small:
            new.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        return new

    def _argument(self, arg: Any, own: Parts, box: Box) -> Any:
        if not isinstance(arg, fx.Node):
            return arg
        return self._block(arg, box) if arg in own.rows else self.whole.get(arg, arg)
