"""A chain written anew, block by block: what `divide.py` decides on is done here."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.outvariants import out_names, out_variant
from memplan.trace.randomness import draws
from memplan.trace.returns import is_backward
from memplan.trace.rewrite import Rewriter, aten, fake_mode_of, storage_key, value
from memplan.trace.rows import (
    COPIES,
    NLL,
    PRODUCTS,
    SLICE,
    SLICE_BACKWARD,
    SUM,
    TRANSPOSE,
    VIEWS,
    Box,
    Chain,
    Parts,
    block_shape,
    boxes,
    parts,
    tensors_of,
)

_NOT_A_CLASS = -100  # torch's default for what is ignored


class _Writer(Rewriter):
    """Remembers what it made."""

    ours: set[fx.Node]

    def _node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super()._node(*args, **kwargs)
        self.ours.add(node)
        return node


class Divider:
    """Writes one chain anew. `made[node, box]` is a block of a node's result."""

    def __init__(self, graph: fx.Graph, chain: Chain, blocks: int) -> None:
        self.graph = graph
        self.chain = chain
        self.boxes = boxes(chain, blocks)
        self.mode: FakeTensorMode = fake_mode_of(graph)
        self.members = set(chain.nodes)
        self.made: dict[tuple[fx.Node, Box], fx.Node] = {}
        self.whole: dict[fx.Node, fx.Node] = {}
        self.ours: set[fx.Node] = set()

    def run(self, moved: list[list[fx.Node]]) -> None:
        """Replace the chain's nodes, phase by phase."""
        for part, late in zip(phases(self.chain), moved, strict=True):
            self.anchor = part[-1].next
            self.phase = part[-1].meta.get("partitioner_tag")
            self._phase(part)
            for node in late:
                self.anchor.prepend(node)
            if not self.chain.sums:  # the backward makes its blocks again
                self.made.clear()
        for node in reversed(self.chain.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _phase(self, part: list[fx.Node]) -> None:
        sinks = [node for node in part if self._leaves(node)]
        shared = next((node for node in reversed(sinks) if self._host(node) is not None), None)
        if shared is not None:  # last: it overwrites what the others may read
            sinks = [*(s for s in sinks if s is not shared), shared]
        places = {s: self._place(s, in_host=s is shared) for s in sinks if s.target not in (SUM, *PRODUCTS, NLL)}
        places |= {s: self._losses(s) for s in sinks if s.target is NLL}
        places |= {s: self._place(s) for s in sinks if s.target in PRODUCTS and self._parts(s).result}
        for box in self.boxes:
            for sink in sinks:
                self._store(sink, places.get(sink), box)
        for sink in sinks:
            if sink.target is NLL:
                self._total(sink, places[sink])
            else:
                self._replace(sink, places[sink] if sink in places else self.whole[sink])

    def _parts(self, node: fx.Node) -> Parts:
        found = parts(node, self.chain.n, sums=self.chain.sums)
        assert found is not None
        return found

    def _leaves(self, node: fx.Node) -> bool:
        """Whether something outside the chain uses the node's result."""
        if node.target is NLL:
            return True
        return any(user not in self.members for user in node.users)

    def _writer(self, node: fx.Node, label: str = "") -> Rewriter:
        rewriter = _Writer(self.graph, self.mode, node, before=self.anchor)
        rewriter.phase, rewriter.label, rewriter.ours = self.phase, label, self.ours
        return rewriter

    # -- blocks ------------------------------------------------------------------------------------------

    def _block(self, node: Any, box: Box) -> fx.Node:
        """The rows `box` of a node's result: computed where it is of the chain, else sliced."""
        key = node, box
        if key not in self.made:
            inside = node in self.members and self._parts(node).result
            self.made[key] = self._run(node, box) if inside else self._rows(node, box)
        return self.made[key]

    def _rows(self, node: fx.Node, box: Box) -> fx.Node:
        """A view of the rows of a whole tensor."""
        rw, n, val = self._writer(node), self.chain.n, value(node)
        if val.is_contiguous() and val.numel() % n == 0:
            shape = block_shape(val.shape, n, n)
            flat = node if list(val.shape) == shape else rw.call(aten.view.default, node, shape)
            each = shape[0] // n
            return rw.call(SLICE, flat, 0, box[0] * each, box[1] * each)
        return rw.call(SLICE, node, 0, *box) if val.shape[0] == n else self._boxed(node, box)

    def _boxed(self, node: fx.Node, box: Box) -> fx.Node:
        """The same of one whose leading dimensions are the rows."""
        rw, inner = self._writer(node), prod(self.chain.lead[1:])
        first, last = box[0] // inner, -(-box[1] // inner)
        view = rw.call(SLICE, node, 0, first, last)
        if len(self.chain.lead) == 1 or last - first > 1:
            return view
        return rw.call(SLICE, view, 1, box[0] - first * inner, box[1] - first * inner)

    def _run(self, node: fx.Node, box: Box, out: fx.Node | None = None) -> fx.Node:
        """Run a node of the chain on a block; `out`: where to write the result."""
        shape = self._shape(node, box)
        if node.target in VIEWS:
            return self._as(self._block(node.args[0], box), shape)
        label = f"{node.name}_rows{self.boxes.index(box)}"
        rw = self._writer(node, label)
        own = self._parts(node)
        args = tuple(self._block(a, box) if a in own.rows else a for a in node.args)
        if node.target in COPIES:
            return self._copy(rw, node, self._block(node.args[0], box), shape)
        if node.target is SLICE_BACKWARD:
            args = (args[0], shape, *args[2:])
        if out is not None:
            return rw.call(out_variant(node.target), *args, **{out_names(out_variant(node.target))[0]: out})  # type: ignore[arg-type]
        return rw.call(node.target, *args, **node.kwargs)

    def _copy(self, rw: Rewriter, node: fx.Node, source: fx.Node, shape: list[int]) -> fx.Node:
        """clone, _to_copy: nothing to do where the block already is what they make."""
        given, dtype = value(source), value(node).dtype
        if given.is_contiguous() and given.dtype == dtype:
            return self._as(source, shape)
        made = rw.call(aten._to_copy.default, source, dtype=dtype, memory_format=torch.contiguous_format)
        return self._as(made, shape)

    def _as(self, node: fx.Node, shape: list[int]) -> fx.Node:
        if list(value(node).shape) == shape:
            return node
        return self._writer(node).call(aten.view.default, node, shape)

    def _shape(self, node: fx.Node, box: Box) -> list[int]:
        if node.target is SLICE:
            return [box[1] - box[0], *value(node).shape[1:]]
        return block_shape(value(node).shape, self.chain.n, box[1] - box[0])

    # -- what leaves the chain ---------------------------------------------------------------------------

    def _place(self, sink: fx.Node, *, in_host: bool = False) -> fx.Node:
        """Memory for a result that is needed whole; padding is zero."""
        rw = self._writer(sink)
        padded = sink.target is SLICE_BACKWARD and not self._parts(sink).result
        if not in_host:
            made = rw.memory(value(sink))
            if padded:
                rw.call(aten.zero_.default, made)
            return made
        host = self._host(sink)
        assert host is not None
        if padded:
            _, _, dim, start, end, _ = sink.args
            size = value(host).shape[dim]
            first, last, _ = slice(start, end).indices(size)
            for a, b in ((0, first), (last, size)):
                if a < b:
                    rw.call(aten.zero_.default, rw.call(SLICE, host, dim, a, b))
        return host

    def _host(self, sink: fx.Node) -> fx.Node | None:
        """The tensor whose rows the sink's may take: read by the chain, row by row, and by nobody else."""
        if not is_backward(sink) or self.chain.sums or not self._parts(sink).rows:
            return None
        for x in self._read_again(sink):
            host = _laid_out_alike(sink, x)
            if host is not None and self._only_read_here(host):
                return host
        return None

    def _read_again(self, sink: fx.Node) -> Iterator[fx.Node]:
        """What the forward left and the sink's blocks are made of: it is alive in the backward anyway."""
        seen, todo = {sink}, [sink]
        while todo:
            for x in self._parts(todo.pop()).rows:
                if x not in self.members and not is_backward(x):
                    yield x
                elif x in self.members and x not in seen:
                    seen.add(x)
                    todo.append(x)

    def _only_read_here(self, host: fx.Node) -> bool:
        key = storage_key(value(host))
        aliases = [n for n in self.graph.nodes if any(storage_key(t) == key for t in tensors_of(n))]
        outside = {a for a in aliases if a not in self.members and a not in self.ours}
        made = [a for a in outside if a.op != "call_function" or not _is_view(a)]
        users = {u for a in outside for u in a.users}
        plain = all(u in self.members or u in outside or u in self.ours for u in users)
        return (
            plain and len(made) == 1 and made[0].op == "call_function" and isinstance(made[0].meta["val"], torch.Tensor)
        )

    def _store(self, sink: fx.Node, place: fx.Node | None, box: Box) -> None:
        """Run the sink on a block, and put the block to its place."""
        if sink.target is NLL:
            self._block_loss(sink, place, box)
        elif place is None:
            self._add_up(sink, box)
        elif sink.target is SLICE_BACKWARD and not self._parts(sink).result:
            _, _, dim, start, end, step = sink.args
            rows = self._boxed(self._writer(sink).call(SLICE, place, dim, start, end, step), box)
            self._fill(sink.args[0], rows, box)  # type: ignore[arg-type]
        else:
            self._fill(sink, self._rows(place, box), box)

    def _fill(self, node: fx.Node, rows: fx.Node, box: Box) -> None:
        """Write the block of a node into `rows`, by its own kernel where that can."""
        base = node
        while base in self.members and base.target in VIEWS:
            base = base.args[0]  # type: ignore[assignment]
        inside = base in self.members and self._parts(base).result and (base, box) not in self.made
        if inside and base.target not in COPIES | {SLICE, SLICE_BACKWARD} and value(rows).is_contiguous():
            own, variant = self._parts(base), out_variant(base.target)
            given = [self._block(a, box) for a in own.rows]
            apart = all(storage_key(value(g)) != storage_key(value(rows)) for g in given)
            if variant is not None and len(out_names(variant)) == 1 and apart:
                self._run(base, box, self._as(rows, self._shape(base, box)))
                self.made[base, box] = self._as(rows, self._shape(base, box))
                return
        block = self._block(node, box)
        rw = self._writer(node)
        rw.call(aten.copy_.default, rows, self._as(block, list(value(rows).shape)))

    def _add_up(self, sink: fx.Node, box: Box) -> None:
        """A sum over rows: the first block's, to which those of the others are added."""
        rw = self._writer(sink, f"{sink.name}_rows{self.boxes.index(box)}")
        if sink.target is SUM:
            block = rw.call(SUM, self._block(sink.args[0], box), *sink.args[1:])
            if sink in self.whole:
                rw.call(aten.add_.Tensor, self.whole[sink], block)
            self.whole.setdefault(sink, block)
        else:
            turned, other = sink.args
            x = self._writer(sink).call(TRANSPOSE, self._block(turned.args[0], box))  # type: ignore[union-attr]
            y = self._block(other, box)
            if sink in self.whole:
                rw.call(aten.addmm_.default, self.whole[sink], x, y)
            else:
                self.whole[sink] = rw.call(aten.mm.default, x, y)

    # -- cross-entropy -----------------------------------------------------------------------------------

    def _losses(self, sink: fx.Node) -> fx.Node:
        """Memory for the loss of each row."""
        x = value(sink.args[0])  # type: ignore[arg-type]
        with self.mode:
            like = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
        return self._writer(sink).scratch(like)

    def _block_loss(self, sink: fx.Node, losses: fx.Node | None, box: Box) -> None:
        assert losses is not None
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
        """Let the users of the sink have `new`, shaped like it; views of it are views of that."""
        old = value(sink)
        v = value(new)
        if (v.shape, v.stride()) != (old.shape, old.stride()):
            new = self._writer(sink).call(aten.view.default, new, list(old.shape))
        sink.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        if storage_key(value(new)) != storage_key(old):
            _rebase(self.graph, new, storage_key(old), self.mode)


def _laid_out_alike(sink: fx.Node, x: fx.Node) -> fx.Node | None:
    """The tensor that the sink can be: `x`, or what `x` was cut from by the slice that the sink undoes."""
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
    alike = given.is_contiguous() and result.is_contiguous() and given.numel() == result.numel()
    return x if alike and (given.dtype, given.device) == (result.dtype, result.device) else None


def _is_view(node: fx.Node) -> bool:
    keys = {storage_key(t) for u in node.all_input_nodes for t in tensors_of(u)}
    return not has_effects(node) and all(storage_key(t) in keys for t in tensors_of(node))


def _rebase(graph: fx.Graph, new: fx.Node, old: int, mode: FakeTensorMode) -> None:
    """Evaluate again what was a view of the bytes `old`, now of those of `new`."""
    todo = [new]
    while todo:
        for user in todo.pop().users:
            if user.op == "call_function" and any(storage_key(t) == old for t in tensors_of(user)) and tensors_of(user):
                args, kwargs = fx.node.map_arg((user.args, user.kwargs), value)
                with mode, torch.no_grad():
                    user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
                todo.append(user)


def has_effects(node: fx.Node) -> bool:
    """Whether it writes in place or draws random numbers: what must keep its place in the program."""
    schema = getattr(node.target, "_schema", None)
    return (schema is not None and schema.is_mutable) or draws(node.target, node.args, node.kwargs)


def phases(chain: Chain) -> list[list[fx.Node]]:
    """Its nodes of the forward, and of the backward; without what is empty."""
    both = ([n for n in chain.nodes if not is_backward(n)], [n for n in chain.nodes if is_backward(n)])
    return [part for part in both if part]
