"""`SplitGraph`: a graph of dynamo that is divided around ops that no plan can hold.

Such an op runs as eager, and the graphs around it are planned, as if dynamo had broken there. Some are known before
anything is traced: `hidden[mask] = embedding` has a fixed shape, so dynamo does not break there, and the gradient of
`embedding` has as many rows as the mask has elements that are true. The others are where tracing fails.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memplan.trace.capture.origins import place_of, source_of

_WRITES_BY_INDEX = (operator.setitem, torch.index_put, "index_put", "index_put_", torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)
_CALLS = ("call_function", "call_method", "call_module")
_CONTEXTS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_saved_tensors_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """Consecutive nodes of a graph. `inputs` are the nodes outside that it reads, `outputs` those that others read.

    `eager`: it runs as it is. `dropped`: the nodes that nothing reads after it. `ends`: why it ends; ""
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


def masked_writes(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a graph of dynamo that write a tensor that requires a gradient at the places of a mask."""
    return [node for node in graph.graph.nodes if _has_a_backward_of_unknown_size(node)]


def nodes_at(graph: fx.GraphModule, place: str) -> list[fx.Node]:
    """Return the nodes that come from a line of the model ("model.py:12"), or have a graph inside that does."""
    return [node for node in graph.graph.nodes if place and node.op in _CALLS and place in set(_lines_of(graph, node))]


def parts_of(graph: fx.GraphModule, eager: Collection[fx.Node], why: str) -> tuple[GraphPart, ...]:
    """Return the parts into which a graph of dynamo is divided around the nodes that run as `eager`; () if it is not.

    A graph that enters a context (autocast, a grad mode) is not divided: a part would not be within it. `why`: why the
    parts before such a node end.
    """
    calls = [node for node in graph.graph.nodes if node.op in _CALLS]
    within = any(str(getattr(n.target, "__name__", "")).startswith(_CONTEXTS) for n in calls)
    if within or not eager or len(eager) == len(calls):
        return ()
    groups = [list(nodes) for _, nodes in itertools.groupby(calls, key=lambda node: node in eager)]
    number = {node: i for i, nodes in enumerate(groups) for node in nodes}
    last = {
        node: max((number.get(user, len(groups)) for user in node.users), default=number.get(node, 0))
        for node in graph.graph.nodes
        if node.op != "get_attr"
    }
    ends = [f"{place_of(after[0])}: {why}" for after in groups[1:]]
    return tuple(
        _part(graph, i, nodes, last, eager=nodes[0] in eager, ends=end)
        for i, (nodes, end) in enumerate(zip(groups, [*ends, ""], strict=True))
    )


def as_eager(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph of dynamo that runs as eager runs it.

    By itself, it would run activation checkpoints that draw other random numbers when they run again.
    """
    made = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    made.meta.update(graph.meta)
    for node in made.graph.nodes:
        inner = getattr(made, node.target) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            setattr(made, node.target, as_eager(inner))
        elif node.target is tag_activation_checkpoint:
            node.target = _checkpointed
    made.recompile()
    return made


def _checkpointed(body: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Run the graph of an activation checkpoint in one of eager."""
    if "_checkpoint_context_fn" in body.meta:
        options["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **{**options, "use_reentrant": False})


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
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = tuple(node for node in read if node.op != "get_attr")
    outputs = tuple(node for node in nodes if last[node] > number)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (*(node for node in read if node.op == "get_attr"), *nodes):
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


def _lines_of(graph: fx.GraphModule, node: fx.Node) -> Iterator[str]:
    """Yield the line of the model that a node comes from, and those of the nodes of graphs that it runs."""
    yield source_of(node)
    for given in node.all_input_nodes:
        inner = getattr(graph, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            yield from (line for each in inner.graph.nodes for line in _lines_of(inner, each))
