"""Divides a graph of dynamo around ops that no plan can hold.

Such an op runs as eager, and the graphs around it are planned, as if dynamo had broken there. Some are known before
anything is traced: `hidden[mask] = embedding` has a fixed shape, so dynamo does not break there, and the gradient of
`embedding` has as many rows as the mask has elements that are true. The others are where tracing fails.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from memplan.trace.capture.origins import place_of, source_of

_WRITES_BY_INDEX = (operator.setitem, torch.index_put, "index_put", "index_put_", torch.ops.aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)
_CALLS = ("call_function", "call_method", "call_module")
_CONTEXTS = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_saved_tensors_hooks")


class Part(NamedTuple):
    """Consecutive nodes of a graph: the name of their module, whether they run as eager, and the line of the first."""

    name: str
    eager: bool
    place: str


def masked_writes(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes of a graph of dynamo that write a tensor that requires a gradient at the places of a mask."""
    return [node for node in graph.graph.nodes if _has_a_backward_of_unknown_size(node)]


def nodes_at(graph: fx.GraphModule, place: str) -> list[fx.Node]:
    """Return the nodes that come from a line of the model ("model.py:12"), or have a graph inside that does."""
    return [node for node in graph.graph.nodes if place and node.op in _CALLS and place in set(_lines_of(graph, node))]


def split_around(graph: fx.GraphModule, eager: Collection[fx.Node]) -> tuple[fx.GraphModule, list[Part]] | None:
    """Return a graph of dynamo that is divided around the nodes that run as `eager`, and its parts in order; or None.

    A graph that enters a context (autocast, a grad mode) is not divided: a part would not be within it.
    """
    calls = [node for node in graph.graph.nodes if node.op in _CALLS]
    within = any(str(getattr(n.target, "__name__", "")).startswith(_CONTEXTS) for n in calls)
    if within or not eager or len(eager) == len(calls):
        return None
    groups = [list(nodes) for _, nodes in itertools.groupby(calls, key=lambda node: node in eager)]
    number = {node: i for i, nodes in enumerate(groups) for node in nodes}
    whole = split_module(graph, graph, number.__getitem__, keep_original_order=True)
    names = [str(node.target) for node in whole.graph.find_nodes(op="call_module")]
    return whole, [Part(name, nodes[0] in eager, place_of(nodes[0])) for name, nodes in zip(names, groups, strict=True)]


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


def example_inputs(part: fx.GraphModule, known: Mapping[str, Any]) -> list[Any]:
    """Return the example inputs of a part: those of the graph, by name, and the fake results of the parts before."""
    nodes = part.graph.find_nodes(op="placeholder")
    return [known[n.target] if n.target in known else n.meta["example_value"] for n in nodes]


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
