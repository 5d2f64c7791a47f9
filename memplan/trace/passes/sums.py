"""Write in place again what a functional graph writes into new tensors: sums of gradients, and writes of slices.

A parameter that is used several times (tied weights, blocks that run twice) gets a gradient for each use, and the graph
adds them pairwise into new tensors. Here each sum is written over one of its terms, so that one buffer holds the
gradient from its first term on. Addition commutes, so the results keep their bits.

A loop that writes rows of a tensor (`out[:, t] = h`) becomes a chain of copies, each with one row changed. Here the
rows are written into the first of them, or into the input or buffer that the loop changes.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from memplan.trace.passes.aliasing import has_effects, is_fixed, keys_of, span
from memplan.trace.passes.out_variants import out_variant
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
from memplan.trace.passes.simplify import ANYWHERE


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
    if between is not node or not all(_is_place_of(n, into) for n in read):
        return
    if (out := out_variant(made.target)) is None:
        return
    Rewriter(graph, fake_mode_of(graph), made, before=node).call(out, *made.args, **made.kwargs, out=into)
    graph.erase_node(node)
    graph.erase_node(made)


def _is_place_of(one: fx.Node, two: fx.Node) -> bool:
    """Return whether two tensors of one storage are the same elements of it, in the same order."""
    a, b = value(one), value(two)
    same = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return same and bool(a.storage_offset() == b.storage_offset())


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


def accumulate_in_place(graph: fx.Graph) -> None:
    """Turn `add(one, two)` into `one.add_(two)`, or `two.add_(one)`, where the sum is a gradient that is returned, or a
    term of one, and that operand has its last use there.
    """
    wanted = keys_of([n for n in returned_by(graph)[1] if isinstance(n, fx.Node) and is_backward(n)])
    last = {key: nodes[-1] for key, nodes in _uses(graph).items()}
    for node in list(reversed(graph.nodes)):  # an outer sum first: its operand may be a sum as well
        if _is_plain_sum(node) and storage_key(value(node)) in wanted:
            one, two = node.all_input_nodes
            for into, other in ((one, two), (two, one)):
                if _can_hold(into, node, last):
                    wanted.add(storage_key(value(into)))
                    _write_over(graph, node, into, other)
                    break


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
    if not is_backward(term) or not _alike(term, total) or last[storage_key(value(term))] is not total:
        return False
    return _is_whole(term, total)


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
