"""Divide by rows: a chain of row-independent ops runs block by block, so that its tensors never exist whole.

In the forward, what the chain reads is sliced, each op runs on a block, and what leaves the chain is written into its
rows. In the backward, the blocks that the forward did not keep are recomputed from what the chain reads, one block at
a time. Where the gradient that leaves is laid out like the tensor that the chain starts from, and nothing else reads
that, its rows overwrite the rows of that tensor: logits and their gradient are one storage.

The mean or sum of a cross-entropy is taken by the same kernel over the same rows, each of which has its loss as its
only class. It adds in the same order, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from memplan.core.division import Division
from memplan.errors import InvalidSize
from memplan.torch_inside.graphs import FakeTensorMode
from memplan.trace.chunking.rows import (
    COPIES,
    NLL,
    SLICE,
    SLICE_BACKWARD,
    Box,
    Chain,
    block_shape,
    boxes,
    chains,
)
from memplan.trace.passes.nodes import has_effects, is_view, keys_of, out_names, out_variant, written_in
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, recompute_views, storage_key, value


def overwritten(chain: Chain, sink: fx.Node, ours: set[fx.Node]) -> fx.Node | None:
    """Return the tensor whose rows the sink's rows may overwrite, or None.

    The chain reads that tensor row by row, and nothing else reads it. `ours`: the nodes made from the chain's so far.
    """
    if not is_backward(sink) or not chain.parts(sink).rows:
        return None
    for x in _read_by_backward(chain, sink):
        found = _same_layout(sink, x)
        if found is not None and _only_read_by({*chain.nodes, *ours}, found):
            return found
    return None


def _read_by_backward(chain: Chain, sink: fx.Node) -> Iterator[fx.Node]:
    """Yield what the sink's blocks are made from and the forward made: it is alive in the backward anyway."""
    members, seen, todo = set(chain.nodes), {sink}, [sink]
    while todo:
        for x in chain.parts(todo.pop()).rows:
            if x not in members and not is_backward(x):
                yield x
            elif x in members and x not in seen:
                seen.add(x)
                todo.append(x)


def _only_read_by(readers: set[fx.Node], tensor: fx.Node) -> bool:
    """Return whether an op made the tensor's bytes, and only `readers` read them, views aside."""
    key = storage_key(value(tensor))
    outside = {n for n in tensor.graph.nodes if n not in readers and key in keys_of(n)}
    made = [n for n in outside if n.op != "call_function" or not is_view(n)]
    if len(made) != 1 or made[0].op != "call_function" or not isinstance(made[0].meta["val"], torch.Tensor):
        return False
    return all(user in readers or user in outside for n in outside for user in n.users)


def _same_layout(sink: fx.Node, x: fx.Node) -> fx.Node | None:
    """Return the tensor that the sink can overwrite: `x`, or what `x` was sliced from if the sink undoes that slice."""
    result = value(sink)
    if sink.target is SLICE_BACKWARD:
        padding = list(sink.args[2:])
        while x.target in VIEWS:
            x = x.args[0]  # type: ignore[assignment]
        cut = [*x.args[1:], *([1] if len(x.args) == 4 else [])] if x.target is SLICE else None
        if cut != padding or value(x.args[0]).shape != result.shape:  # type: ignore[arg-type]
            return None
        x = x.args[0]  # type: ignore[assignment]
    given = value(x)
    same_elements = given.is_contiguous() and result.is_contiguous() and given.numel() == result.numel()
    return x if same_elements and (given.dtype, given.device) == (result.dtype, result.device) else None


_NOT_A_CLASS = -100  # torch's default for the class to ignore


class ChunkRewriter:
    """Rewrites one chain. `made[node, box]` is a block of a node's result."""

    def __init__(self, graph: fx.Graph, chain: Chain, blocks: int) -> None:
        self.graph = graph
        self.chain = chain
        self.boxes = boxes(chain, blocks)
        self.mode: FakeTensorMode = fake_mode_of(graph)
        self.members = set(chain.nodes)
        self.made: dict[tuple[fx.Node, Box], fx.Node] = {}
        self.ours: set[fx.Node] = set()

    def run(self, moved: list[list[fx.Node]]) -> None:
        """Replace the chain's nodes, phase by phase."""
        for part, late in zip(self.chain.phases, moved, strict=True):
            self.anchor = part[-1].next
            self.phase = part[-1].meta.get("partitioner_tag")
            self._phase(part)
            for node in late:
                self.anchor.prepend(node)
            self.made.clear()  # the backward recomputes its blocks
        for node in reversed(self.chain.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _phase(self, part: list[fx.Node]) -> None:
        """Write the blocks of the chain's nodes in one phase, and replace what leaves the chain."""
        sinks = [node for node in part if self._leaves(node)]
        found = ((s, overwritten(self.chain, s, self.ours)) for s in reversed(sinks))
        last, memory = next(((s, memory) for s, memory in found if memory is not None), (None, None))
        sinks.sort(key=lambda s: s is last)  # this one overwrites what the others may read
        places = {s: self._place(s, memory if s is last else None) for s in sinks if s.target is not NLL}
        places |= {s: self._losses(s) for s in sinks if s.target is NLL}
        for box in self.boxes:
            for sink in sinks:
                self._store(sink, places[sink], box)
        for sink in sinks:
            if sink.target is NLL:
                self._total(sink, places[sink])
            else:
                self._replace(sink, places[sink])

    def _leaves(self, node: fx.Node) -> bool:
        """Return whether something outside the chain uses the node's result."""
        if node.target is NLL:
            return True
        return any(user not in self.members for user in node.users)

    def _writer(self, node: fx.Node, label: str = "") -> Rewriter:
        """Return a rewriter for a node, at the current position and phase."""
        rewriter = Rewriter(self.graph, self.mode, node, before=self.anchor)
        rewriter.phase, rewriter.label, rewriter.made = self.phase, label, self.ours
        return rewriter

    # -- blocks ------------------------------------------------------------------------------------------

    def _block(self, node: Any, box: Box) -> fx.Node:
        """Return the rows `box` of a node's result: computed if the node is of the chain, else sliced."""
        key = node, box
        if key not in self.made:
            inside = node in self.members and self.chain.parts(node).result
            self.made[key] = self._run(node, box) if inside else self._rows(node, box)
        return self.made[key]

    def _rows(self, node: fx.Node, box: Box) -> fx.Node:
        """Return a view of the rows of a whole tensor."""
        rw, n, val = self._writer(node), self.chain.n, value(node)
        if val.is_contiguous() and val.numel() % n == 0:
            shape = block_shape(val.shape, n, n)
            flat = node if list(val.shape) == shape else rw.call(aten.view.default, node, shape)
            each = shape[0] // n
            return rw.call(SLICE, flat, 0, box[0] * each, box[1] * each)
        return rw.call(SLICE, node, 0, *box) if val.shape[0] == n else self._boxed(node, box)

    def _boxed(self, node: fx.Node, box: Box) -> fx.Node:
        """Return a view of the rows of a tensor whose leading dimensions are the rows."""
        rw, inner = self._writer(node), prod(self.chain.lead[1:])
        first, last = box[0] // inner, -(-box[1] // inner)
        view = rw.call(SLICE, node, 0, first, last)
        if len(self.chain.lead) == 1 or last - first > 1:
            return view
        return rw.call(SLICE, view, 1, box[0] - first * inner, box[1] - first * inner)

    def _run(self, node: fx.Node, box: Box, out: fx.Node | None = None) -> fx.Node:
        """Run a node of the chain on a block; `out` is where to write the result."""
        shape = self._shape(node, box)
        if node.target in VIEWS:
            return self._as(self._block(node.args[0], box), shape)
        label = f"{node.name}_rows{self.boxes.index(box)}"
        rw = self._writer(node, label)
        own = self.chain.parts(node)
        args = tuple(self._block(a, box) if a in own.rows else a for a in node.args)
        if node.target in COPIES:
            return self._copy(rw, node, self._block(node.args[0], box), shape)
        if out is not None:
            return rw.call(out_variant(node.target), *args, **{out_names(out_variant(node.target))[0]: out})  # type: ignore[arg-type]
        return rw.call(node.target, *args, **node.kwargs)

    def _copy(self, rw: Rewriter, node: fx.Node, source: fx.Node, shape: list[int]) -> fx.Node:
        """Run clone or _to_copy on a block: nothing to do if the block has the layout and type that they make."""
        given, dtype = value(source), value(node).dtype
        if given.is_contiguous() and given.dtype == dtype:
            return self._as(source, shape)
        made = rw.call(aten._to_copy.default, source, dtype=dtype, memory_format=torch.contiguous_format)
        return self._as(made, shape)

    def _as(self, node: fx.Node, shape: list[int]) -> fx.Node:
        """Return a node viewed in this shape."""
        if list(value(node).shape) == shape:
            return node
        return self._writer(node).call(aten.view.default, node, shape)

    def _shape(self, node: fx.Node, box: Box) -> list[int]:
        """Return the shape of a block of a node's result."""
        return block_shape(value(node).shape, self.chain.n, box[1] - box[0])

    # -- what leaves the chain ---------------------------------------------------------------------------

    def _place(self, sink: fx.Node, memory: fx.Node | None = None) -> fx.Node:
        """Return the memory for a result that is needed whole, `memory` or new; its padding is set to zero."""
        rw = self._writer(sink)
        padded = sink.target is SLICE_BACKWARD
        if memory is None:
            memory = rw.memory(value(sink))
            if padded:
                rw.call(aten.zero_.default, memory)
        elif padded:
            _, _, dim, start, end, _ = sink.args
            size = value(memory).shape[dim]
            first, last, _ = slice(start, end).indices(size)
            for a, b in ((0, first), (last, size)):
                if a < b:
                    rw.call(aten.zero_.default, rw.call(SLICE, memory, dim, a, b))
        return memory

    def _store(self, sink: fx.Node, place: fx.Node, box: Box) -> None:
        """Run the sink on a block, and write the block to its place."""
        if sink.target is NLL:
            self._block_loss(sink, place, box)
        elif sink.target is SLICE_BACKWARD:
            _, _, dim, start, end, step = sink.args
            rows = self._boxed(self._writer(sink).call(SLICE, place, dim, start, end, step), box)
            self._fill(sink.args[0], rows, box)  # type: ignore[arg-type]
        else:
            self._fill(sink, self._rows(place, box), box)

    def _fill(self, node: fx.Node, rows: fx.Node, box: Box) -> None:
        """Write the block of a node into `rows`, by its own kernel if that can."""
        base = node
        while base in self.members and base.target in VIEWS:
            base = base.args[0]  # type: ignore[assignment]
        inside = base in self.members and self.chain.parts(base).result and (base, box) not in self.made
        if inside and base.target not in COPIES and value(rows).is_contiguous():
            own, variant = self.chain.parts(base), out_variant(base.target)
            given = [self._block(a, box) for a in own.rows]
            apart = all(storage_key(value(g)) != storage_key(value(rows)) for g in given)
            if variant is not None and len(out_names(variant)) == 1 and apart:
                self._run(base, box, self._as(rows, self._shape(base, box)))
                self.made[base, box] = self._as(rows, self._shape(base, box))
                return
        block = self._block(node, box)
        rw = self._writer(node)
        rw.call(aten.copy_.default, rows, self._as(block, list(value(rows).shape)))

    # -- cross-entropy -----------------------------------------------------------------------------------

    def _losses(self, sink: fx.Node) -> fx.Node:
        """Return memory for the loss of each row."""
        x = value(sink.args[0])  # type: ignore[arg-type]
        with self.mode:
            like = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
        return self._writer(sink).scratch(like)

    def _block_loss(self, sink: fx.Node, losses: fx.Node, box: Box) -> None:
        """Write the losses of a block's rows."""
        x, target, _, _, ignored = sink.args
        rw = self._writer(sink, f"{sink.name}_rows{self.boxes.index(box)}")
        rows = (self._block(x, box), self._block(target, box))
        with self.mode:
            unused = self._writer(sink).scratch(torch.empty((), dtype=value(losses).dtype, device=value(losses).device))
        out = {"output": self._rows(losses, box), "total_weight": unused}
        rw.call(aten.nll_loss_forward.output, *rows, None, 0, ignored, **out)

    def _total(self, sink: fx.Node, losses: fx.Node) -> None:
        """Reduce the losses by the sink's own kernel, each as the only class of its row."""
        _, target, _, reduction, ignored = sink.args
        rw = self._writer(sink)
        x = rw.call(aten.view.default, rw.call(aten.neg.default, losses), [value(losses).numel(), 1])
        flags = rw.call(aten._to_copy.default, rw.call(aten.eq.Scalar, target, ignored), dtype=torch.int64)
        classes = rw.call(aten.mul.Tensor, flags, _NOT_A_CLASS)
        rw.label = f"{sink.name}_rows"
        new = rw.making(value(sink), NLL, x, classes, None, reduction, _NOT_A_CLASS)
        sink.replace_all_uses_with(new)

    def _replace(self, sink: fx.Node, new: fx.Node) -> None:
        """Replace the sink by `new`, viewed in its shape; views of the sink become views of that."""
        old = value(sink)
        v = value(new)
        if (v.shape, v.stride()) != (old.shape, old.stride()):
            new = self._writer(sink).call(aten.view.default, new, list(old.shape))
        sink.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        if storage_key(value(new)) != storage_key(old):
            recompute_views(dict.fromkeys(new.users), storage_key(old), self.mode)


def divide(graph: fx.Graph, division: Division) -> Division:
    """Divide the chains of a functional graph, in place, and return the division with `over` settled, to repeat it.

    Chains whose order allows no division are left as they are. Raises `InvalidSize` without a number of blocks.
    """
    if division.blocks is None:
        raise InvalidSize("no number of blocks was chosen", where="divide", hint="pass one")
    written = written_in(graph)
    found = chains(graph, lambda chain: _can_move(chain, written) is not None)
    over = division.over
    if over is None:
        over = max((c.need for c in found), default=0) - 1
    for chain in found:
        if chain.need > over and (sunk := _can_move(chain, written_in(graph))) is not None:
            ChunkRewriter(graph, chain, division.blocks).run(sunk)
    return replace(division, over=over)


def _can_move(chain: Chain, written: set[int]) -> list[list[fx.Node]] | None:
    """Return, by phase, the nodes between those of the chain that must run after the chain's part in that phase.

    Returns None if a part cannot run at one point of the program, or if what it reads is one of the storages `written`.
    """
    members = set(chain.nodes)
    if any(written & keys_of(node.all_input_nodes) for node in chain.nodes):
        return None
    moved: list[list[fx.Node]] = []
    for part in chain.phases:
        late: list[fx.Node] = []
        behind = set(part)
        for node in _between(part[0], part[-1]):
            if node in members:
                if set(node.all_input_nodes) & set(late):
                    return None
            elif set(node.all_input_nodes) & behind:
                if node.op != "call_function" or has_effects(node):
                    return None
                late.append(node)
                behind.add(node)
        moved.append(late)
    return moved


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes from `first` to `last`."""
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last
