"""Adds matrix products to the other summand of a sum (`divide=Division(sums=True)`).

What several projections read gets a gradient from each: queries, keys and values, or the two halves of a gated layer.
Inductor keeps all these products until one kernel adds them up. `addmm` adds each to the one before it instead, in the
same bytes (`sums_in_place.py`); that adds the same numbers in another order.
"""

from __future__ import annotations

from torch import fx

from memplan.trace.fused.row_parts import NAMED, VIEWS
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value

_SUMS = (aten.mm.default, aten.addmm.default)


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
    return node if node.target in _SUMS and len(node.users) == 1 and not scaled else None
