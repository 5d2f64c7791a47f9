"""Remove ops that need not run: those that change no bit, repeated ones, and copies of what can be made in place.

Each rule leaves every number as it was, and keeps no bytes alive that were not: a value replaces another one only where
its storage is no larger. What the caller passes or is returned, and what an op writes, is left alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.trace.passes.aliasing import has_effects, is_fixed, is_view, keys_of, span, tensors_of, written_in
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import CHECKPOINT, aten, fake_mode_of, replace_by, storage_key, value

_SMALL = 4096  # bytes of a result that is shared, and so may live longer
_BY_ONE = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar}
SLICES = {  # ops that write a tensor to a view of a copy of another, and that view
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
_COPIES = {aten.clone.default, aten._to_copy.default}
# Rounded once in every kernel (IEEE 754): no real result depends on where it is written, but complex ones do.
ANYWHERE = {
    *(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor),
    *(aten.neg.default, aten.abs.default, aten.where.self),
}


def simplify(graph: fx.Graph) -> None:
    """Remove ops that need not run, in place. `graph` is functional."""
    made = _made(graph)
    for node in reversed(graph.nodes):
        write = node.target in SLICES or node.target is aten.copy.default
        if node.op == "call_function" and not node.users and (write or is_view(node)):
            graph.erase_node(node)
        elif node.target in SLICES:
            _write_once(graph, node)
    for node in list(graph.nodes):
        if _is_fixed(node) and keys_of(node) <= made.keys():
            same = _unchanged(node)
            if same is not None and keys_of(same) <= made.keys() and _size(same, made) <= _size(node, made):
                replace_by(graph, node, same)
    _share(graph, made)
    mode = fake_mode_of(graph)
    for node in list(graph.nodes):
        if node.target in _COPIES and _is_fixed(node) and keys_of(node) <= made.keys():
            _make_in_place(graph, mode, node, made)


def _made(graph: fx.Graph) -> dict[int, int]:
    """Return the bytes of each storage that an op makes for the step alone: not the caller's, and written once."""
    bound = keys_of(returned_by(graph)[1]) | written_in(graph)
    bound |= {key for node in graph.nodes if node.op != "call_function" for key in keys_of(node)}
    sizes: dict[int, int] = {}
    for node in graph.nodes:
        for tensor in tensors_of(node):
            if is_fixed(tensor) and storage_key(tensor) not in bound:
                sizes.setdefault(storage_key(tensor), span(tensor))
    return sizes


def _size(node: fx.Node, made: dict[int, int]) -> int:
    """Return the bytes of a node's storage."""
    return made[storage_key(value(node))]


def _is_fixed(node: fx.Node) -> bool:
    """Return whether a node makes one plain tensor whose sizes are numbers."""
    return isinstance(node.meta.get("val"), torch.Tensor) and is_fixed(value(node))


def _same_layout(one: fx.Node, two: fx.Node) -> bool:
    """Return whether two nodes have the same type, device, shape and strides."""
    a, b = value(one), value(two)
    if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        return False
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True))


def _unchanged(node: fx.Node) -> fx.Node | None:
    """Return the argument that the result equals bit by bit, with the same layout; None if it may differ."""
    written = node.target is aten.copy.default
    x = node.args[written] if node.args else None
    if not isinstance(x, fx.Node) or not _is_fixed(x) or not _same_layout(x, node):
        return None
    one = len(node.args) == 2 and type(node.args[1]) in (int, float) and node.args[1] == 1
    by_one = node.target in _BY_ONE and one and not node.kwargs and not value(x).is_complex()  # inf * 0i is NaN
    padded = node.target is aten.constant_pad_nd.default and not any(node.args[1])  # type: ignore[arg-type]
    whole = node.target is aten.slice_backward.default  # the slice is the whole tensor
    return x if by_one or padded or whole or written or node.target in _COPIES else None


def _write_once(graph: fx.Graph, node: fx.Node) -> None:
    """Write a slice of a slice (`x[a:][i] = y`) to its place at once, and a slice onto itself (`x[i] += y`) not at all.

    Functional graphs write to a copy of the outer slice, and then that to a copy of the whole.
    """
    x, source = node.args[:2]
    if not isinstance(x, fx.Node) or not _is_fixed(x) or not _is_fixed(node) or not _same_layout(x, node):
        return
    inner = node
    with fake_mode_of(graph), torch.no_grad():
        place = SLICES[node.target](value(x), *node.args[2:], **node.kwargs)  # type: ignore[index]
        while isinstance(source, fx.Node) and not _is_at(source, place):
            if source.target is aten.copy.default:
                source = source.args[1]
            elif source.target in SLICES and len(source.users) == 1 and _is_at(source.args[0], place):
                inner, source = source, source.args[1]
                place = SLICES[inner.target](place, *inner.args[2:], **inner.kwargs)  # type: ignore[index]
            else:
                break
    if isinstance(source, fx.Node) and _is_at(source, place):
        replace_by(graph, node, x)
    elif inner is not node and not value(x).storage_offset():
        node.target = aten.as_strided_scatter.default
        node.args = (x, inner.args[1], list(place.shape), list(place.stride()), place.storage_offset())
        node.kwargs = {}


def _is_at(node: Any, place: torch.Tensor) -> bool:
    """Return whether a node is the tensor that lies at a place in memory."""
    if not isinstance(node, fx.Node) or not _is_fixed(node) or storage_key(value(node)) != storage_key(place):
        return False
    one = value(node)
    same = (one.dtype, one.shape, one.stride()) == (place.dtype, place.shape, place.stride())
    return same and one.storage_offset() == place.storage_offset()


def _share(graph: fx.Graph, made: dict[int, int]) -> None:
    """Replace repeated computations of a small result, within one phase of the step, by the first; views likewise.

    What an activation checkpoint drops stays apart: making the first again would make its whole region again.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            continue  # a user's op may do more than its schema says
        if has_effects(node) or not _is_fixed(node):
            continue
        if any(user.op == "output" for user in node.users):
            continue
        small = keys_of(node) <= made.keys() and _size(node, made) <= _SMALL and "empty" not in node.target._opname
        if small or is_view(node):
            dropped = 0 if is_view(node) else node.meta.get(CHECKPOINT, 0)
            first = known.setdefault((is_backward(node), dropped, str((node.target, node.args, node.kwargs))), node)
            if first is not node:
                replace_by(graph, node, first)


def _make_in_place(graph: fx.Graph, mode: FakeTensorMode, copy: fx.Node, made: dict[int, int]) -> None:
    """Let a pointwise op write its result in the layout that `copy` gives it, where the result is for `copy` alone."""
    views, op = [], copy.args[0]
    while isinstance(op, fx.Node) and is_view(op) and len(op.users) == 1:
        views.append(op)
        op = op.args[0]
    if not isinstance(op, fx.Node) or op.target not in ANYWHERE or not _is_its_own(op, copy, made):
        return
    with contextlib.suppress(RuntimeError, ValueError), mode, torch.no_grad():  # a view that these strides do not allow
        layout = value(copy)
        for view in views:
            layout = _undone(view, layout)
        remade = [layout]
        for view in reversed(views):
            remade.append(view.target(remade[-1], *view.args[1:]))  # type: ignore[operator]
        if remade[-1].shape != value(copy).shape or remade[-1].stride() != value(copy).stride():
            return
        for node, val in zip((op, *reversed(views)), remade, strict=True):
            node.meta["val"] = val
        copy.replace_all_uses_with(views[0] if views else op)
        graph.erase_node(copy)


def _is_its_own(op: fx.Node, copy: fx.Node, made: dict[int, int]) -> bool:
    """Return whether the result of `op` is for `copy` alone, and of the same type and size."""
    if len(op.users) != 1 or op.kwargs or not _is_fixed(op) or not keys_of(op) <= made.keys():
        return False
    if any(tensor.is_complex() for tensor in (value(op), *tensors_of(op.args))):
        return False
    one, two = value(op), value(copy)
    same_kind = (one.dtype, one.device, one.numel()) == (two.dtype, two.device, two.numel())
    return same_kind and _size(op, made) == _size(copy, made) and is_backward(op) == is_backward(copy)


def _undone(view: fx.Node, of: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose `view` is `of`. Raises `RuntimeError` where there is none."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    if view.target is aten.transpose.int:
        return of.transpose(*view.args[1:])  # type: ignore[arg-type]
    if view.target is aten.t.default:
        return of.t()
    if view.target is aten.permute.default:
        dims: Any = view.args[1]
        return of.permute([dims.index(i) for i in range(len(dims))])
    if view.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.unsqueeze.default):
        return of.view(value(source).shape)
    raise RuntimeError(view.target)
