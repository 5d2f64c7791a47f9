"""Adds products and scattered gradients to the other summand of a sum, in its bytes (`divide=Division(sums=True)`).

What several projections read gets a gradient from each: queries, keys and values, or the two halves of a gated layer.
Inductor keeps all these products until one kernel adds them up. `addmm` adds each to the one before it instead. The
gradient of an embedding whose weight is used once more, by the head of a language model, is a sum of two tensors of
the weight's size: what the head's product gives, and rows that are scattered into zeros. Scattered into the product
instead, they need no bytes of their own. That adds the same numbers in another order.

Inductor runs `addmm` with a result of its own. Where nothing else reads the first summand afterwards, it adds in
place, with the same bits (`with_sums_in_place`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from memplan.trace.fused.kernel_runs import Block, BlockView, KernelRun, extent
from memplan.trace.fused.row_parts import NAMED
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import VIEWS, Rewriter, aten, fake_mode_of, value

_ADDED = (aten.mm.default, aten.addmm.default)


def sum_products(graph: fx.Graph) -> int:
    """Have matrix products of the backward that are only added up added to each other by `addmm`; in place.

    Returns:
        The number of sums that were rewritten.

    Example:
        >>> sum_products(joint.graph)
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    mode = fake_mode_of(graph)
    rewritten = 0
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        pair = [_product(arg, add) for arg in add.args]
        if add.kwargs or not is_backward(add) or None in pair or pair[0] is pair[1]:
            continue
        first, last = sorted((node for node in pair if node is not None), key=place.__getitem__)
        if last.target is not aten.mm.default or value(first).shape != value(last).shape:
            continue  # a product that is made before the other summand would keep what it reads until then
        writer = Rewriter(graph, mode, last, before=add)
        total = writer.call(aten.addmm.default, first, *last.args)
        place[total] = place[add]
        view = writer.call(aten.view.default, total, list(value(add).shape))
        for new in (total, view):
            new.meta.update({key: add.meta[key] for key in NAMED if key in add.meta})
        add.replace_all_uses_with(view)
        rewritten += 1
    if rewritten:
        graph.eliminate_dead_code()
        graph.lint()
    return rewritten


def _product(node: object, add: fx.Node) -> fx.Node | None:
    """Return the product that a summand is a view of, if nothing else reads it and it is made for this sum alone."""
    if not isinstance(node, fx.Node) or value(node).shape != value(add).shape or value(node).dtype != value(add).dtype:
        return None
    while node.target in VIEWS and len(node.users) == 1 and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    scaled = bool(node.kwargs)  # by alpha, or beta
    return node if node.target in _ADDED and len(node.users) == 1 and not scaled else None


_SCATTERS = (aten._unsafe_masked_index_put_accumulate.default, aten._unsafe_index_put.default, aten.index_put.default)
_ACCUMULATES = 3  # the position of that argument of `index_put`
_ZEROS = (aten.full.default, aten.zeros.default, aten.new_zeros.default)


def scatter_into_summands(graph: fx.Graph) -> int:
    """Have rows that are scattered into zeros, and then added to a tensor, scattered into that tensor; in place.

    Returns:
        The number of sums that were rewritten.

    Example:
        >>> scatter_into_summands(joint.graph)
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    rewritten = 0
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for scatter, other in (add.args, add.args[::-1]):
            if not _is_scatter(scatter) or add.kwargs or not isinstance(other, fx.Node):
                continue
            a, b = value(scatter), value(other)
            alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            if not alike or place[other] > place[scatter]:
                continue  # the scatter is first, and what it reads would live longer
            scatter.update_arg(0, other)
            add.replace_all_uses_with(scatter)
            graph.erase_node(add)
            rewritten += 1
            break
    if rewritten:
        graph.eliminate_dead_code()
        graph.lint()
    return rewritten


def _is_scatter(node: object) -> bool:
    """Return whether a node scatters rows into zeros for one sum, and adds up those of the same place."""
    if not isinstance(node, fx.Node) or node.target not in _SCATTERS or len(node.users) != 1:
        return False
    zeros = node.args[0]
    adds = node.target is _SCATTERS[0] or (len(node.args) > _ACCUMULATES and node.args[_ACCUMULATES] is True)
    if not adds or not isinstance(zeros, fx.Node) or zeros.target not in _ZEROS:
        return False
    return zeros.target is not aten.full.default or bool(zeros.args[1] == 0)


_ADDMM = "extern_kernels.addmm"


def with_sums_in_place(
    runs: Sequence[KernelRun], outputs: Sequence[Any], inputs: Collection[Block]
) -> tuple[tuple[KernelRun, ...], tuple[Any, ...]]:
    """Return the calls of a graph's code and its outputs, where sums have the bytes of their first summand.

    The kernel is the same, and so are the bits: it copies that summand into its result before it adds to it. What the
    code is given (`inputs`) stays as it is.

    Example:
        >>> runs, outputs = with_sums_in_place(replay.run(), replay.outputs(), {view.block for view in views})
    """
    last: dict[Block, int] = {}
    first: dict[Block, int] = {}
    for i, run in enumerate(runs):
        for view in (*run.reads, *run.writes):
            last[view.block] = i
            first.setdefault(view.block, i)
    kept = {*inputs, *(view.block for view in outputs if isinstance(view, BlockView))}
    taken: dict[Block, Block] = {}
    for i, run in enumerate(runs):
        pair = _summand_and_result(run)
        if pair is None:
            continue
        summand, result = pair
        factors = pytree.tree_leaves(run.args[1:], is_leaf=lambda leaf: isinstance(leaf, BlockView))
        alone = all(not isinstance(view, BlockView) or view.block is not summand.block for view in factors)
        free = not summand.block.given and summand.block not in kept and last[summand.block] == i
        if alone and free and first[result.block] == i and result.block not in inputs:
            taken[result.block] = taken.get(summand.block, summand.block)

    def moved(leaf: Any) -> Any:
        return replace(leaf, block=taken[leaf.block]) if isinstance(leaf, BlockView) and leaf.block in taken else leaf

    def all_moved(tree: Any) -> Any:
        return pytree.tree_map(moved, tree, is_leaf=lambda leaf: isinstance(leaf, BlockView))

    if not taken:
        return tuple(runs), tuple(outputs)
    fields = ("args", "kwargs", "reads", "writes", "results", "overwritable")
    made = (replace(run, **{name: all_moved(getattr(run, name)) for name in fields}) for run in runs)
    return tuple(made), tuple(map(moved, outputs))


def _summand_and_result(run: KernelRun) -> tuple[BlockView, BlockView] | None:
    """Return what `addmm` adds to and its result, if both fill all of their bytes in the same way."""
    summand, result = (run.args[0] if run.args else None), run.kwargs.get("out")
    if run.name != _ADDMM or not isinstance(summand, BlockView) or not isinstance(result, BlockView):
        return None
    same = (summand.dtype, summand.shape, summand.strides) == (result.dtype, result.shape, result.strides)
    whole = all(view.offset == 0 and extent(view) == view.block.nbytes for view in (summand, result))
    return (summand, result) if same and whole else None
