"""Python numbers that dynamo passes as tensors because they have changed before; a plan treats each as a constant."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx


def numbers_of(graph: fx.GraphModule) -> frozenset[str]:
    """Return the inputs that are Python numbers which have changed before (an annealed temperature, a dropout rate).

    Each of them has no use but its `item()`.
    """
    return frozenset(node.name for node in graph.graph.find_nodes(op="placeholder") if _is_number(node))


def _is_number(node: fx.Node) -> bool:
    """Return whether an input is used by nothing but its `item()`."""
    items = [user for user in node.users if user.op == "call_method" and user.target == "item"]
    return len(items) == len(node.users) > 0 and all(
        isinstance(user.meta.get("example_value"), torch.SymFloat) for user in items
    )


def with_numbers(graph: fx.GraphModule, numbers: Mapping[str, float]) -> fx.GraphModule:
    """Return the graph for these numbers, which are constants of a plan."""
    if not numbers:
        return graph
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in made.graph.find_nodes(op="placeholder"):
        for item in list(node.users) if node.name in numbers else ():
            item.replace_all_uses_with(numbers[node.name])
            made.graph.erase_node(item)
    made.recompile()
    return made
