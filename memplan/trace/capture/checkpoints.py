"""Activation checkpoints: which ones each op is within, and those whose step computes something else than eager's.

AOTAutograd gives an op the number of the outermost checkpoint around it. Dynamo's graphs have one graph for each, and
what is in a node's `meta["custom"]` reaches the joint graph.
"""

from __future__ import annotations

import operator
from itertools import count
from typing import Any

from torch import fx, nn

from memplan.torch_inside.graphs import InputMutationAOTOutput
from memplan.trace.capture.origins import origin_of
from memplan.trace.passes.checkpoints import AROUND, DROPS, NOTES

_REGION = "tag_activation_checkpoint"


def note_checkpoints(module: nn.Module) -> None:
    """Note in each node of a checkpoint's graph which checkpoints are around it, from the outermost."""
    numbers = count(1)

    def visit(owner: Any, around: tuple[int, ...]) -> None:
        """Note `around` in the nodes of a graph, and go on with the graphs of its checkpoints."""
        for node in owner.graph.nodes:
            if around:
                node.meta[NOTES] = {**(node.meta.get(NOTES) or {}), AROUND: around}
            if getattr(node.target, "__name__", "") == _REGION and isinstance(node.args[0], fx.Node):
                body = getattr(owner, str(node.args[0].target), None)
                if isinstance(body, fx.GraphModule):
                    visit(body, (*around, next(numbers)))

    if isinstance(module, fx.GraphModule):
        visit(module, ())


_BATCH_NORMS = ("_native_batch_norm_legit", "native_batch_norm", "_batch_norm_with_update", "cudnn_batch_norm")


def updates_run_once(graph: fx.Graph) -> tuple[str, ...]:
    """Return a warning for each place in a joint graph that changes a buffer or an input inside of a checkpoint.

    Eager runs it once more in the backward. The graph returns the new value; an op that computes it belongs to a batch
    norm also where that was decomposed.
    """
    (output,) = graph.find_nodes(op="output")
    pairs = zip(output.args[0], output.meta.get("desc") or (), strict=False)
    found = dict[str, str]()  # by place
    for node in (node for node, desc in pairs if isinstance(desc, InputMutationAOTOutput)):
        made = node.args[0] if node.target is operator.getitem else node
        if not made.meta.get("ac_graph_id") or made.meta.get("recompute") not in DROPS:
            continue
        place = origin_of(made)
        where = " in ".join(part for part in (place.module, place.source) if part) or made.name
        op = getattr(made.meta.get("original_aten") or made.target, "_opname", "")
        if op.startswith(_BATCH_NORMS):
            found[place.module or where] = (
                f"{where}: batch norm inside of a checkpoint. Eager updates its running statistics twice in each step, "
                "this step once"
            )
        else:
            found.setdefault(
                place.module or where,
                f"{where}: changed in place inside of a checkpoint. Eager changes it twice in each step, and computes "
                "gradients by what it is then; this step changes it once",
            )
    return tuple(found.values())
