"""Add the terms of a gradient in the gradient's own bytes, as autograd accumulates them.

A parameter that is used several times (tied weights, blocks that run twice) gets a gradient for each use, and the graph
adds them pairwise into new tensors. Here each sum is written over one of its terms, so that one buffer holds the
gradient from its first term on. Addition commutes, so the results keep their bits.
"""

from __future__ import annotations

from torch import fx

from memplan.trace.passes.aliasing import is_fixed, keys_of, span
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import aten, replace_by, storage_key, value


def accumulate_in_place(graph: fx.Graph) -> None:
    """Turn `add(one, two)` into `one.add_(two)`, or `two.add_(one)`, where the sum is a gradient that is returned, or a
    term of one, and that operand has its last use there.
    """
    wanted = keys_of([n for n in returned_by(graph)[1] if isinstance(n, fx.Node) and is_backward(n)])
    last = _last_uses(graph)
    for node in list(reversed(graph.nodes)):  # an outer sum first: its operand may be a sum as well
        if _is_plain_sum(node) and storage_key(value(node)) in wanted:
            one, two = node.all_input_nodes
            for into, other in ((one, two), (two, one)):
                if _can_hold(into, node, last):
                    wanted.add(storage_key(value(into)))
                    _write_over(graph, node, into, other)
                    break


def _last_uses(graph: fx.Graph) -> dict[int, fx.Node]:
    """Return for each storage the last node that takes or makes something in it."""
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for key in keys_of([node, *node.all_input_nodes]):
            last[key] = node
    return last


def _is_plain_sum(node: fx.Node) -> bool:
    """Return whether a node of the backward adds two tensors as they are."""
    return (
        node.op == "call_function"
        and node.target is aten.add.Tensor
        and is_backward(node)
        and not node.kwargs
        and len(node.all_input_nodes) == 2
        and len(keys_of(node.all_input_nodes)) == 2  # not a tensor and its transpose
        and not value(node).is_complex()
    )


def _can_hold(term: fx.Node, total: fx.Node, last: dict[int, fx.Node]) -> bool:
    """Return whether a sum may overwrite a term: its layout is the sum's, and it is whole, new and read no more."""
    if term.op != "call_function" or not is_backward(term):
        return False
    one, two = value(term), value(total)
    alike = (one.dtype, one.shape, one.stride(), one.device) == (two.dtype, two.shape, two.stride(), two.device)
    if not alike or not is_fixed(one) or one.storage_offset() or last[storage_key(one)] is not total:
        return False
    maker = _maker(term)
    return maker is not None and is_backward(maker) and span(one) == one.numel() * one.dtype.itemsize


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


def _write_over(graph: fx.Graph, total: fx.Node, into: fx.Node, other: fx.Node) -> None:
    """Replace a sum by the addition in place of `other` into `into`; views of the sum become views of `into`."""
    with graph.inserting_before(total):
        written = graph.create_node("call_function", aten.add_.Tensor, (into, other), name=f"{total.name}_in_place")
    written.meta.update(total.meta)
    written.meta["val"] = value(into)
    replace_by(graph, total, written)
