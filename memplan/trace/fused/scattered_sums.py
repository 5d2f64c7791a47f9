"""Adds scattered gradients to the other summand of a sum (`divide=Division(sums=True)`).

The gradient of an embedding whose weight is used once more, by the head of a language model, is a sum of two tensors of
the weight's size: what the head's product gives, and rows that are scattered into zeros. Scattered into the product
instead, they need no bytes of their own. That adds the same numbers in another order.
"""

from __future__ import annotations

from torch import fx

from memplan.trace.passes.rewrite import aten, value

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
            if not _is_scatter(scatter) or add.kwargs or not isinstance(other, fx.Node) or not _alike(scatter, other):
                continue
            if place[other] > place[scatter]:
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


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = value(one), value(other)
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
