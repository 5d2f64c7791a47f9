"""Remove ops that need not run: those that change no bit, and copies of what can be written in place.

Each rule leaves every number as it was, and keeps no bytes alive that were not: a value replaces another one only
where its storage is no larger. What the caller passes or is returned, and what an op writes, is left alone.

`simplify` comes before lowering, `write_in_place` after it. A loop that writes rows of a tensor (`out[:, t] = h`)
becomes a chain of copies, each with one row changed: the rows are written into the first of them, or into the input or
buffer that the loop changes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.nodes import (
    has_effects,
    is_fixed,
    is_view,
    keys_of,
    out_variant,
    span,
    tensors_of,
    written_in,
)
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import (
    CHECKPOINT,
    MEMORY_ONLY,
    Rewriter,
    aten,
    fake_mode_of,
    replace_by,
    storage_key,
    value,
)

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


def write_in_place(graph: fx.Graph) -> None:
    """Leave out copies that are made to change a part of them, where the original has its last use there.

    What is read between two writes could not be computed again later, so it stays a copy, which may take the original's
    bytes in the plan; but not where it is returned or written back to an input, which is never computed again. What a
    checkpoint may compute again stays a copy, too.
    """
    chosen = _needless_copies(graph)
    for node in reversed(chosen):  # from the first of a chain on: each one's views are looked at once
        into, base = node.args[:2]
        graph.erase_node(node)
        if into is not base and into.op != "placeholder":  # type: ignore[union-attr]
            replace_by(graph, into, base)  # type: ignore[arg-type]
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default) if chosen else ():
        _update(graph, node)


def _needless_copies(graph: fx.Graph) -> list[fx.Node]:
    """Return the copies that `write_in_place` leaves out, from the last on: those into new memory that is changed
    afterwards, and those of the result to the input that it was a copy of.
    """
    uses, chosen = _uses(graph), list[fx.Node]()
    kept = keys_of([n for n in returned_by(graph)[1] if isinstance(n, fx.Node)])
    write_backs: dict[int, fx.Node] = {}  # storage -> the copy of what is in it at last to an input
    for node in [n for n in reversed(graph.nodes) if n.target is aten.copy_.default and CHECKPOINT not in n.meta]:
        into, base = node.args[:2]
        if not isinstance(into, fx.Node) or not isinstance(base, fx.Node) or not _alike(into, base):
            continue
        old, new = storage_key(value(base)), storage_key(value(into))
        if into.op == "placeholder" and all(_is_read_at_once(use, old) for use in uses[old][uses[old].index(node) :]):
            write_backs[old] = node
        if into.target not in MEMORY_ONLY or node.prev is not into or not _is_changed(new, uses[new]):
            continue
        back = write_backs.get(new)
        if back is not None and back.args[0] is base and uses[old][-2:] == [node, back]:
            chosen += [back, node]
        elif uses[old][-1] is node and _is_whole(base, node):
            if back is not None:
                write_backs[old] = back
            if back is not None or new in kept:
                kept.add(old)
            if old in kept or all(old in keys_of(use) for use in uses[old][:-1]):
                chosen.append(node)
    return chosen


def _update(graph: fx.Graph, node: fx.Node) -> None:
    """Have an op write its result where `node` copies it to, if it reads that very place: `x[i] += y` needs no memory
    for the sum.
    """
    into, made = node.args[:2]
    if not isinstance(into, fx.Node) or not isinstance(made, fx.Node) or made.target not in ANYWHERE or node.users:
        return
    key, alone = storage_key(value(into)), len(made.users) == 1 and not value(made).is_complex()
    read = [n for n in made.all_input_nodes if key in keys_of(n)]
    one, two = value(made), value(into)
    if not alone or not read or (one.dtype, one.shape, one.device) != (two.dtype, two.shape, two.device):
        return
    between = made.next
    while between is not node and not has_effects(between):
        between = between.next
    if between is not node or not all(_is_at(n, value(into)) for n in read):
        return
    if (out := out_variant(made.target)) is None:
        return
    Rewriter(graph, fake_mode_of(graph), made, before=node).call(out, *made.args, **made.kwargs, out=into)
    graph.erase_node(node)
    graph.erase_node(made)


def _uses(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Return for each storage the nodes that take or make something in it, in order."""
    found = defaultdict[int, list[fx.Node]](list)
    for node in graph.nodes:
        for key in keys_of([node, *node.all_input_nodes]):
            found[key].append(node)
    return found


def _is_read_at_once(node: fx.Node, key: int) -> bool:
    """Return whether a node of the forward reads memory, for nobody else; the caller may change an input later."""
    writes = has_effects(node) and key in keys_of(node)
    return node.op == "call_function" and not is_backward(node) and not writes


def _is_changed(key: int, uses: list[fx.Node]) -> bool:
    """Return whether memory is written once more after the copy that fills it, by one of its `uses`."""
    return any(has_effects(node) and key in keys_of(node) for node in uses[2:])


def _alike(one: fx.Node, two: fx.Node) -> bool:
    """Return whether two tensors have one layout."""
    a, b = value(one), value(two)
    alike = (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
    return bool(alike and is_fixed(a) and is_fixed(b)) and a.storage_offset() == b.storage_offset() == 0


def _is_whole(base: fx.Node, node: fx.Node) -> bool:
    """Return whether a tensor is all of some memory that is made in the phase of `node`, outside of checkpoints."""
    maker = _maker(base) if base.op == "call_function" else None
    if maker is None or is_backward(maker) is not is_backward(node) or CHECKPOINT in maker.meta:
        return False
    return bool(span(value(base)) == value(base).numel() * value(base).dtype.itemsize)


def _maker(term: fx.Node) -> fx.Node | None:
    """Return the node that makes the memory of a term, unless that is an argument of the graph or larger than it."""
    key, node = storage_key(value(term)), term
    while True:
        base = next((n for n in node.all_input_nodes if key in keys_of(n)), None)
        if base is None:
            return node
        if base.op != "call_function" or isinstance(base.meta["val"], (tuple, list)):
            new = base.op == "call_function" and key not in keys_of(base.all_input_nodes)
            return base if new else None
        if value(base).numel() != value(term).numel():
            return None
        node = base
