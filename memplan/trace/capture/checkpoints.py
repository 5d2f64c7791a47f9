"""Activation checkpoints: which ones each op is within, what they drop, and what they compute unlike eager.

Dynamo traces a region of `torch.utils.checkpoint` once. Its nodes carry the region's number (`ac_graph_id`) and a
policy (`recompute`); which results leave the region is implicit. Autograd's sequence numbers tell it: a backward node
has the number of the forward op that saved what it reads. Of regions within regions, nodes carry the number of the
outermost: the others are noted before the joint trace, where dynamo has one graph for each. What is in a node's
`meta["custom"]` reaches the joint graph.
"""

from __future__ import annotations

import operator
from itertools import count
from typing import Any

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from memplan.torch_inside.graphs import InputMutationAOTOutput
from memplan.trace.capture.origins import origin_of
from memplan.trace.passes.nodes import keys_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import CHECKPOINT, WITHIN

DROPS = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)
NOTES, AROUND = "custom", "memplan_checkpoints"  # a key of torch's in a node's meta, and one in the dict under it
_ALL = 1 << 30
_Regions = tuple[int, ...]  # the numbers of the regions that a node is in, from the outermost


def mark_checkpoints(graph: fx.Graph) -> None:
    """Set `meta[CHECKPOINT]` to the region's number on each node of which eager keeps no result for the backward.

    A result inside a region is kept where an op outside of every region saves it, where another region takes it as an
    input, and where a selective policy says so. Results that share memory with a kept one are kept. Of regions within
    regions, a result is of the innermost that nobody outside keeps it for, and `meta[WITHIN]` are those around it.
    """
    regions = _regions(graph)
    if not any(regions.values()):
        return
    of_sequence = {node.meta.get("seq_nr"): region for node, region in regions.items() if region}
    depth: dict[int, int] = {}  # storage -> how many of the regions that it is in drop it
    for node in graph.nodes:
        found = _dropped_to(node, regions, of_sequence)
        for key in keys_of(node):
            depth[key] = min(depth.get(key, found), found)
    for node, region in regions.items():
        dropped = region[: min((depth[key] for key in keys_of(node)), default=0)]
        if dropped and node.meta.get("recompute") in DROPS:
            node.meta[CHECKPOINT] = dropped[-1]
            node.meta[WITHIN] = dropped[:-1]


def _regions(graph: fx.Graph) -> dict[fx.Node, _Regions]:
    """Return the regions of each node; none for those of the backward."""
    numbers = (int(node.meta.get(key) or 0) for node in graph.nodes for key in ("ac_graph_id", CHECKPOINT))
    new = count(max(numbers, default=0) + 1)
    known: dict[_Regions, int] = {}
    found: dict[fx.Node, _Regions] = {}
    for node in graph.nodes:
        outermost = int(node.meta.get("ac_graph_id") or 0)
        if node.op != "call_function" or is_backward(node) or not outermost:
            found[node] = ()
            continue
        regions: _Regions = (outermost,)
        for inner in (node.meta.get(NOTES) or {}).get(AROUND, ())[1:]:
            key = (*regions, inner)
            if key not in known:
                known[key] = next(new)
            regions = (*regions, known[key])
        found[node] = regions
    return found


def _dropped_to(node: fx.Node, regions: dict[fx.Node, _Regions], of_sequence: dict[int | None, _Regions]) -> int:
    """Return how many of the regions that a node is in drop its results, from the outermost; `_ALL`: each of them.

    The others keep them, which is where an op saves them, or a region takes them as inputs.
    """
    own, found = regions[node], _ALL
    if is_backward(node):
        return found
    if own and node.meta.get("recompute") not in DROPS:
        return 0
    for user in node.users:
        saved = is_backward(user)
        theirs = of_sequence.get(user.meta.get("seq_nr"), ()) if saved else regions[user]
        if user.op == "output" or (saved and not theirs):
            return 0
        shared = sum(one == two for one, two in zip(own, theirs, strict=False))
        if (0 < shared < len(own)) if saved else shared < len(theirs):
            found = min(found, shared)
    return found


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


def updates_run_once(graph: fx.Graph) -> tuple[str, ...]:
    """Return a warning for each place in a joint graph that changes a buffer or an input inside of a checkpoint.

    Eager runs it once more in the backward, as that of a batch norm's running statistics.
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
        found.setdefault(
            place.module or where,
            f"{where}: changed in place inside of a checkpoint. Eager changes it twice in each step, and computes "
            "gradients that read it by what it is then; this step changes it once",
        )
    return tuple(found.values())
