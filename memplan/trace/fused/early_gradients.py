"""Computes the gradients of divided chains in the forward, where only one number comes in between.

What a loss head passes to the backward is a multiple of one number: the gradient of the loss, which is 1 in
`loss.backward()`. So the forward can compute all of it for 1, block by block beside the loss, and the backward
multiplies it by the number that comes in. Then no block is computed twice, and none is kept. (Liger-Kernel's fused
linear cross-entropy does the same by hand: https://arxiv.org/abs/2410.10989.)

The numbers are those of a backward for 1, times that number: a power of two changes no digit, another one rounds once
more. float16 is left alone: there losses are scaled to keep gradients from vanishing, which has to happen before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.trace.chunking.rows import FULL
from memplan.trace.fused.row_parts import BLOCK, PERMUTE, PRODUCTS, SUM, is_zero, names_of
from memplan.trace.passes.partitions import TAG
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, value

EARLY = "memplan_early"  # in the meta of a node: a gradient that the forward computes, and saves
_SUMS = {aten.add.Tensor, aten.sub.Tensor}
_CAT = aten.cat.default
_CONVERT = torch.ops.prims.convert_element_type.default
# Ops that are linear in their first operand, whatever the other arguments are, if no other one comes from a gradient.
_OF_FIRST = VIEWS | {
    *(PERMUTE, SUM, _CONVERT),
    *(aten.neg.default, aten.clone.default, aten._to_copy.default, aten.expand.default, aten.slice.Tensor),
    *(aten.squeeze.dim, aten.unsqueeze.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor, aten.sum.default),
}
# Ops that put an operand into the first one, and its position.
_SCATTERED: dict[object, int] = {aten.slice_scatter.default: 1, aten.scatter.src: 3}
_WIDE = (torch.float32, torch.float64, torch.bfloat16)  # no small gradient vanishes in them, and none is rounded to 0


def compute_gradients_early(graph: fx.Graph) -> int:
    """Compute gradients of divided chains in the forward, for each scalar output of which they are multiples.

    Args:
        graph: A joint graph whose chains are divided.

    Returns:
        The number of gradients that the forward computes.

    Example:
        >>> compute_gradients_early(joint.graph)
        2
    """
    given, found = _tangents(graph), 0
    for tangent in given:
        if isinstance(tangent.meta.get("val"), torch.Tensor) and not value(tangent).dim() and tangent.users:
            found += _for_one(graph, tangent, [node for node in given if node is not tangent])
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return found


def _for_one(graph: fx.Graph, tangent: fx.Node, others: Collection[fx.Node]) -> int:
    """Compute early what depends on this gradient; return the number of results that the backward scales."""
    multiples = _multiples(graph, tangent)
    if multiples is None or not multiples.isdisjoint(_reached(graph, others)):
        return 0
    place = {node: i for i, node in enumerate(graph.nodes)}
    chain = sorted(multiples - {tangent}, key=place.__getitem__)
    mode = fake_mode_of(graph)
    writer = Rewriter(graph, mode, next(node for node in graph.nodes if BLOCK in node.meta))
    writer.phase = "is_forward"
    one = writer.call(FULL, [], 1.0, dtype=value(tangent).dtype, device=value(tangent).device)
    made: dict[fx.Node, fx.Node] = {tangent: one}  # others may read what leads to the blocks: copies
    exits = []
    for node in chain:
        if BLOCK not in node.meta and node.target is not _CAT:
            made[node] = _copied(graph, node, made)
            continue
        for source in node.all_input_nodes:
            if source in made:
                node.replace_input_with(source, made[source])
        outside = [user for user in node.users if user not in multiples]
        if outside:
            exits.append((node, outside))
    for node, outside in exits:
        writer = Rewriter(graph, mode, node, before=min(outside, key=place.__getitem__))
        writer.phase = "is_backward"
        scaled = writer.call(aten.mul.Tensor, node, tangent)
        scaled.meta.update(names_of(node))
        for user in outside:
            user.replace_input_with(node, scaled)
        node.meta[TAG], node.meta[EARLY] = CheckpointPolicy.MUST_SAVE, True
    return len(exits)


def _multiples(graph: fx.Graph, tangent: fx.Node) -> set[fx.Node] | None:
    """Return the nodes of blocks that are multiples of a gradient, and what leads from it to them and joins them.

    None if nothing is, or if some node of a block is not although it reads one that is.
    """
    dependent = _reached(graph, [tangent])
    leading, found = {tangent}, set[fx.Node]()
    for node in graph.nodes:
        sources = dependent.intersection(node.all_input_nodes)
        multiples = sources & (leading | found)
        if not multiples or node.op != "call_function":
            continue
        val = node.meta.get("val")
        linear = isinstance(val, torch.Tensor) and val.dtype in _WIDE and _is_linear(node, multiples)
        linear = linear and sources == multiples
        if BLOCK in node.meta:
            if not linear:
                return None
            found.add(node)
        elif linear and sources <= leading and node.target not in PRODUCTS:
            leading.add(node)
        elif linear and node.target is _CAT and sources <= found:
            found.add(node)
    if not any(node.target in PRODUCTS for node in found):
        return None
    todo = list(found)
    while todo:
        sources = leading.intersection(todo.pop().all_input_nodes) - found
        found |= sources
        todo += sources
    return found


def _is_linear(node: fx.Node, sources: Collection[fx.Node]) -> bool:
    """Return whether an op multiplies its result by a number when these operands are multiplied by it."""
    target, args = node.target, node.args
    if any(isinstance(arg, fx.Node) for arg in node.kwargs.values()):
        return False
    if target in _OF_FIRST:
        return args[0] in sources and not any(arg in sources for arg in args[1:] if isinstance(arg, fx.Node))
    if target is aten.mul.Tensor or target is aten.mm.default:
        return (args[0] in sources) != (args[1] in sources)
    if target is aten.addmm.default:
        return args[0] in sources and (args[1] in sources) != (args[2] in sources)
    if target in _SUMS:
        return all(_vanishes(arg, sources) for arg in args[:2])
    if target is aten.where.self:
        return args[0] not in sources and all(_vanishes(arg, sources) for arg in args[1:])
    if target in _SCATTERED:
        put = _SCATTERED[target]
        rest = [arg for i, arg in enumerate(args) if i not in (0, put)]
        return all(_vanishes(args[i], sources) for i in (0, put)) and not any(arg in sources for arg in rest)
    if target is _CAT:
        return all(_vanishes(arg, sources) for arg in node.all_input_nodes)
    return False


def _vanishes(arg: object, sources: Collection[fx.Node]) -> bool:
    """Return whether an operand is a multiple too, or zero."""
    return is_zero(arg) or (isinstance(arg, fx.Node) and arg in sources)


def _tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs that are gradients."""
    return [node for node in graph.find_nodes(op="placeholder") if node.meta["desc"].is_tangent()]


def _reached(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Return all nodes that depend on these."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _copied(graph: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of a node, after it, that reads what was made instead of its operands."""
    with graph.inserting_after(node):
        new = graph.node_copy(node, lambda source: made.get(source, source))
    new.meta["partitioner_tag"] = "is_forward"
    return new
