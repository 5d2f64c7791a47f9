"""Python numbers that dynamo passes as tensors because they have changed before; a plan treats each as a constant."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import fx


def numbers_of(graph: fx.GraphModule) -> frozenset[str]:
    """Return the inputs that are Python numbers which have changed before (an annealed temperature, a dropout rate).

    Each of them has no use but its `item()`, also in a graph inside that it is passed to (a custom Function's).
    """
    return frozenset(node.name for node in graph.graph.find_nodes(op="placeholder") if _is_number(graph, node))


def _is_number(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether an input of a graph is used by nothing but its `item()`."""
    return bool(node.users) and all(
        _is_item(user) or ((inner := _taken_by(graph, user, node)) is not None and _is_number(*inner))
        for user in node.users
    )


def _is_item(node: fx.Node) -> bool:
    """Return whether a node is the `item()` of a number that varies."""
    is_symbol = isinstance(node.meta.get("example_value"), torch.SymFloat)
    return node.op == "call_method" and node.target == "item" and is_symbol


def _taken_by(graph: fx.GraphModule, user: fx.Node, node: fx.Node) -> tuple[fx.GraphModule, fx.Node] | None:
    """Return the graph inside that a higher-order op runs, and its input for `node`; None for other ops."""
    bodies = [x for x in user.args if isinstance(x, fx.Node) and x.op == "get_attr"]
    rest = user.args[len(bodies) :]
    body = getattr(graph, str(bodies[0].target), None) if bodies else None
    once = bodies and sum(n.target == bodies[0].target for n in graph.graph.find_nodes(op="get_attr")) == 1
    if not isinstance(body, fx.GraphModule) or not once or rest.count(node) != 1:
        return None
    inputs = body.graph.find_nodes(op="placeholder")
    return body, inputs[len(inputs) - len(rest) + rest.index(node)]


def with_numbers(graph: fx.GraphModule, numbers: Mapping[str, float]) -> fx.GraphModule:
    """Return the graph for these numbers, which are constants of a plan."""
    if not numbers:
        return graph
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    made.meta.update(graph.meta)
    inside: dict[fx.GraphModule, dict[str, float]] = {}
    for node in made.graph.find_nodes(op="placeholder"):
        for user in list(node.users) if node.name in numbers else ():
            inner = _taken_by(made, user, node)
            if inner is None:
                user.replace_all_uses_with(numbers[node.name])
                made.graph.erase_node(user)
            else:
                inside.setdefault(inner[0], {})[inner[1].name] = numbers[node.name]
    for name, body in list(made.named_children()):
        if body in inside:
            setattr(made, name, with_numbers(body, inside[body]))
    made.recompile()
    return made
