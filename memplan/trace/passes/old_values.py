"""Keeps a partition from computing again in the backward what the forward computed from an input that it changes.

A joint graph is functional: the new value of an input is written at the end of the forward. What reads the old value
may therefore run in the forward only, where the input still has it.
"""

from __future__ import annotations

from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from memplan.errors import UnsupportedGraph
from memplan.trace.passes.aliasing import is_view, keys_of, written_in


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
