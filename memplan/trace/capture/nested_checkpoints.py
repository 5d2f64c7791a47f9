"""Note which activation checkpoint each op is in where one is within another.

AOTAutograd gives an op the number of the outermost checkpoint around it. Dynamo's graphs have one graph for each, and
what is in a node's `meta["custom"]` reaches the joint graph.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from torch import fx, nn

from memplan.trace.passes.checkpoints import AROUND, NOTES

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
