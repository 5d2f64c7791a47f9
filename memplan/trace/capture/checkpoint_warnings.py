"""Finds activation checkpoints whose step computes something else than eager's, for warnings."""

from __future__ import annotations

import operator

from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

from memplan.trace.capture.origins import origin_of
from memplan.trace.passes.checkpoints import DROPS

_REGION = "tag_activation_checkpoint"
_BATCH_NORMS = ("_native_batch_norm_legit", "native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm")


def gradients_that_eager_lacks(graph: fx.Graph) -> tuple[str, ...]:
    """Return a warning for each reentrant checkpoint in a graph of dynamo whose parameters get no gradient in eager.

    A reentrant checkpoint returns results without a gradient if none of its inputs requires one. Dynamo traces it as
    if it were not reentrant, and its parameters get gradients.
    """
    found = []
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") != _REGION or not node.kwargs.get("use_reentrant"):
            continue
        tensors = [a for a in node.args[1:] if isinstance(a, fx.Node)]
        inputs = [a for a in tensors if a.type is not nn.Parameter]
        if any(map(_requires_grad, tensors)) and not any(map(_requires_grad, inputs)):
            found.append(
                f"{origin_of(node).source or node.name}: no input of this checkpoint requires a gradient. With "
                "use_reentrant=True, eager then computes no gradients for the parameters in it; this step does, as "
                "eager does with use_reentrant=False"
            )
    return tuple(found)


def statistics_updated_once(graph: fx.Graph) -> tuple[str, ...]:
    """Return a warning for each batch norm of a joint graph whose running statistics eager updates twice per step.

    It is inside of a checkpoint, and eager runs it once more in the backward. The graph returns the new statistics; an
    op that computes them belongs to a batch norm also where that was decomposed.
    """
    (output,) = graph.find_nodes(op="output")
    pairs = zip(output.args[0], output.meta.get("desc") or (), strict=False)
    found = dict[str, None]()
    for node in (node for node, desc in pairs if isinstance(desc, InputMutationAOTOutput)):
        made = node.args[0] if node.target is operator.getitem else node
        op = getattr(made.meta.get("original_aten") or made.target, "_opname", "")
        if op.startswith(_BATCH_NORMS) and made.meta.get("ac_graph_id") and made.meta.get("recompute") in DROPS:
            place = origin_of(made)
            where = " in ".join(part for part in (place.module, place.source) if part) or made.name
            found[
                f"{where}: batch norm inside of a checkpoint. Eager updates its running statistics twice in each step, "
                "this step once"
            ] = None
    return tuple(found)


def _requires_grad(node: fx.Node) -> bool:
    """Return whether the tensor of a node requires a gradient."""
    return bool(getattr(node.meta.get("example_value"), "requires_grad", False))
