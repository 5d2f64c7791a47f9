"""Says to torch's partitioner which nodes of a joint graph to save and which to compute again.

Tags are those of activation checkpoints (`node.meta["recompute"]`). With a tag on every node that the backward needs
from the forward, min-cut rematerialization has nothing left to choose. A joint graph is functional: the new value of an
input is written at the end of the forward. What reads the old value may therefore run in the forward only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import InputMutationAOTOutput, PlainAOTOutput, view_ops
from memplan.trace.passes.nodes import is_view, keys_of, written_in


def readers_of_old_values(graph: fx.Graph) -> set[fx.Node]:
    """Return the ops that compute from an input of a joint graph which the step changes; views compute nothing."""
    changed = written_in(graph) | _replaced(graph)
    ops = (node for node in graph.nodes if node.op == "call_function")
    return {node for node in ops if keys_of(node.all_input_nodes) & changed and not is_view(node)}


def save_old_values(graph: fx.Graph) -> None:
    """Tag what is computed from inputs that the step changes: torch's partitioner then saves it for the backward."""
    for node in readers_of_old_values(graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def require_new_values(joint: fx.Graph, forward: fx.Graph, backward: fx.Graph) -> None:
    """Raise `UnsupportedGraph` if the backward of a partition reads an input that the forward has changed by then."""
    changed = written_in(forward) | _replaced(joint)
    for node in backward.find_nodes(op="placeholder"):
        if node.users and keys_of(node) & changed:
            reason = f"the backward reads {node.name}, which the forward has changed by then"
            hint = "change a copy of it, or change it after the backward"
            raise UnsupportedGraph(node.name, reason, hint, see="old-value")


def _replaced(joint: fx.Graph) -> set[int]:
    """Return the storages of inputs whose new values a joint graph returns, for its caller to write back."""
    (output,) = joint.find_nodes(op="output")
    descs = output.meta.get("desc") or ()
    mutated = {desc.mutated_input for desc in descs if isinstance(desc, InputMutationAOTOutput)}
    return keys_of([n for n in joint.find_nodes(op="placeholder") if n.meta.get("desc") in mutated])


TAG = "recompute"
_COLLECTIVES = ("_c10d_functional", "c10d")


def tag_saved(
    graph: fx.Graph,
    saved: Collection[str],
    *,
    backward: Collection[fx.Node] | None = None,
) -> tuple[str, ...]:
    """Tag a joint graph so that these nodes (by name) are saved, and return the names of all that will be.

    What the backward needs beyond them is computed again, except where that could give other numbers: random numbers
    and collectives are saved, as is what reads an input that the forward overwrites. A view is saved as what it is a
    view of.

    Args:
        graph: The graph of forward and backward.
        saved: The names of nodes of the forward.
        backward: The nodes of the backward; None: those that depend on a gradient that comes in.

    Example:
        >>> tag_saved(joint.graph, {"mm", "gelu"})
        ('mm', 'gelu')
    """
    for node in graph.nodes:
        node.meta.pop(TAG, None)
    views = view_ops()
    backward = _depends_on_tangents(graph) if backward is None else backward
    unsafe = _not_again(graph)
    wanted = {_base(node, views) for node in graph.nodes if node.name in saved}
    kept: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = [n for node in graph.nodes if node in backward for n in node.all_input_nodes if n not in backward]
    (output,) = graph.find_nodes(op="output")
    stack += [n for n in output.all_input_nodes if n not in backward and _is_gradient_only(n, output)]
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node in unsafe or (node in wanted and _is_tensor(node)):
            kept[node] = None
            continue
        node.meta[TAG] = CheckpointPolicy.MUST_RECOMPUTE
        stack.extend(node.all_input_nodes)
    for node in {**kept, **dict.fromkeys(node for node in graph.nodes if node in unsafe and node not in backward)}:
        node.meta[TAG] = CheckpointPolicy.MUST_SAVE
    return tuple(node.name for node in graph.nodes if node in kept)


def made_in_the_forward(
    graph_module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    *,
    num_fwd_outputs: int,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph so that the forward computes these nodes.

    torch's partitioner may leave what no output of the forward needs to the backward, whatever its tags say. So they
    are outputs of the forward while it decides.

    Args:
        graph_module: The joint graph; it is as before afterwards.
        nodes: Nodes that depend on no gradient, and are tagged to be saved.
        partition: Partitions the graph; it takes the number of the forward's outputs, and `options`.
        num_fwd_outputs: The number of the forward's own outputs.

    Returns:
        The forward, with its own outputs and what is saved, and the backward.
    """
    if not nodes:
        return partition(num_fwd_outputs=num_fwd_outputs, **options)
    (output,) = graph_module.graph.find_nodes(op="output")
    results, descs = list(output.args[0]), list(output.meta["desc"])
    at, end = num_fwd_outputs, num_fwd_outputs + len(nodes)
    added = [PlainAOTOutput(idx=len(results) + i) for i in range(len(nodes))]
    output.args = ((*results[:at], *nodes, *results[at:]),)
    output.meta["desc"] = [*descs[:at], *added, *descs[at:]]
    forward, backward = partition(num_fwd_outputs=end, **options)
    for graph, inside in ((graph_module.graph, True), (forward.graph, False)):
        (returned,) = graph.find_nodes(op="output")
        both, said = list(returned.args[0]), list(returned.meta.get("desc") or ())
        del both[at:end], said[at:end]
        returned.args = (tuple(both),)
        if inside or said:
            returned.meta["desc"] = said
    forward.recompile()
    return forward, backward


def _depends_on_tangents(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that cannot be computed before the gradients come in."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or (node.op != "output" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _is_gradient_only(node: fx.Node, output: fx.Node) -> bool:
    """Return whether the graph returns a node as a gradient, although no gradient that comes in leads to it."""
    results, descs = output.args[0], output.meta.get("desc") or ()
    pairs = zip(results, descs, strict=False) if isinstance(results, (tuple, list)) else ()
    return any(result is node and type(desc).__name__ == "GradAOTOutput" for result, desc in pairs)


def is_collective(node: fx.Node) -> bool:
    """Return whether a node communicates with other processes, or waits for that."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


def _not_again(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that must not run twice: random ones, collectives, and readers of overwritten inputs."""
    found = readers_of_old_values(graph)
    for node in (one for one in graph.nodes if one.op == "call_function"):
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        item = node.target is operator.getitem and node.args[0] in found
        if random or item or is_collective(node):
            found.add(node)
    return found


def _base(node: fx.Node, views: Iterable[object]) -> fx.Node:
    """Return the node whose memory a chain of views shows: torch's partitioner always computes views again."""
    while node.op == "call_function" and getattr(node.target, "overloadpacket", node.target) in views:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
