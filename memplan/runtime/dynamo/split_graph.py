"""`SplitGraph`: a graph of dynamo that is divided around ops whose backward no graph can hold.

`hidden[mask] = embedding` has a fixed shape, so dynamo does not break there, and the gradient of `embedding` has as
many rows as the mask has elements that are true. Such an op runs eagerly, and the graphs around it are planned, as if
dynamo had broken there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from memplan.trace.capture.origins import place_of

_WRITES_BY_INDEX = (operator.setitem, torch.index_put, "index_put", "index_put_", torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)
_CONTEXTS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_saved_tensors_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """Consecutive nodes of a graph. `inputs` are the nodes outside that it reads, `outputs` those that others read.

    `eager`: it is one op that runs as it is. `dropped`: the nodes that nothing reads after it. `ends`: why it ends; ""
    for the last one.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    dropped: tuple[fx.Node, ...]
    eager: bool
    ends: str


class SplitGraph:
    """The callable of a graph that is divided: it runs `runs`, one callable for each part, one after another."""

    def __init__(
        self, graph: fx.GraphModule, parts: Sequence[GraphPart], runs: Sequence[Callable[..., Sequence[Any]]]
    ) -> None:
        self._inputs = tuple(graph.graph.find_nodes(op="placeholder"))
        self._result = graph.graph.output_node().args[0]
        self._parts = tuple(zip(parts, runs, strict=True))

    def __call__(self, *inputs: Any) -> Any:
        """Run all parts, and return what the graph returns. What no later part reads is released at once."""
        env = dict(zip(self._inputs, inputs, strict=True))
        del inputs
        for part, run in self._parts:
            env.update(zip(part.outputs, run(*(env[node] for node in part.inputs)), strict=True))
            for node in part.dropped:
                env.pop(node, None)
        return fx.node.map_arg(self._result, env.__getitem__)


def parts_of(graph: fx.GraphModule) -> tuple[GraphPart, ...]:
    """Return the parts into which a graph of dynamo is divided; () if it is planned as one.

    A graph that enters a context (autocast, a grad mode) is not divided: a part would not be within it.
    """
    eager = [node for node in graph.graph.nodes if _has_a_backward_of_unknown_size(node)]
    if not eager or any(str(getattr(n.target, "__name__", "")).startswith(_CONTEXTS) for n in graph.graph.nodes):
        return ()
    groups: list[list[fx.Node]] = [[]]
    for node in graph.graph.nodes:
        if node in eager:
            groups += [[node], []]
        elif node.op not in ("placeholder", "output"):
            groups[-1].append(node)
    groups = [nodes for nodes in groups if nodes]
    number = {node: i for i, nodes in enumerate(groups) for node in nodes}
    last = {
        node: max((number.get(user, len(groups)) for user in node.users), default=number.get(node, 0))
        for node in graph.graph.nodes
    }
    ends = [f"{place_of(after[0])}: the shape of a gradient depends on a mask" for after in groups[1:]]
    return tuple(
        _part(graph, i, nodes, last, eager=nodes[0] in eager, ends=why)
        for i, (nodes, why) in enumerate(zip(groups, [*ends, ""], strict=True))
    )


def example_inputs(part: GraphPart, graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the example inputs of a part: those of the graph, and the fake results of the parts before."""
    given = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
    return [given[node] if node in given else node.meta["example_value"] for node in part.inputs]


def _part(
    graph: fx.GraphModule,
    number: int,
    nodes: Sequence[fx.Node],
    last: dict[fx.Node, int],
    *,
    eager: bool,
    ends: str,
) -> GraphPart:
    """Return the part of a graph that has these nodes. `last`: the number of the last part that reads each node."""
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
    outputs = tuple(node for node in nodes if last[node] > number)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[node] for node in outputs))
    dropped = tuple(node for node in last if last[node] == number or (node in inside and node not in outputs))
    module = fx.GraphModule(graph, made)
    return GraphPart(module=module, inputs=inputs, outputs=outputs, dropped=dropped, eager=eager, ends=ends)


def _has_a_backward_of_unknown_size(node: fx.Node) -> bool:
    """Return whether a node writes a tensor that requires a gradient at the places of a mask."""
    if node.target not in _WRITES_BY_INDEX or len(node.args) < 3 or not torch.is_grad_enabled():
        return False
    written = node.args[2]
    masks = [x.meta.get("example_value") for x in pytree.tree_leaves(node.args[1]) if isinstance(x, fx.Node)]
    value = written.meta.get("example_value") if isinstance(written, fx.Node) else None
    masked = any(isinstance(mask, torch.Tensor) and mask.dtype in _MASKS for mask in masks)
    return masked and isinstance(value, torch.Tensor) and value.requires_grad
