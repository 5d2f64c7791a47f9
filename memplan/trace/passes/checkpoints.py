"""Mark the ops whose results eager makes again in the backward: those inside `torch.utils.checkpoint`.

Dynamo traces a checkpointed region once. Its nodes carry the region's number (`ac_graph_id`) and a policy
(`recompute`); which results leave the region is implicit. Autograd's sequence numbers tell it: a backward node has the
number of the forward op that saved what it reads.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import CHECKPOINT, storage_key

DROPS = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


def mark_checkpoints(graph: fx.Graph) -> None:
    """Set `meta[CHECKPOINT]` to the region's number on each node of which eager keeps no result for the backward.

    A result inside a region is kept where an op outside of every region saves it, where another region takes it as an
    input, and where a selective policy says so. Results that share memory with a kept one are kept.
    """
    regions = {node: _region_of(node) for node in graph.nodes}
    if not any(regions.values()):
        return
    of_sequence = {node.meta.get("seq_nr"): region for node, region in regions.items() if region}
    kept = set()
    for node in graph.nodes:
        keys = _storages(node)
        if keys and _is_kept(node, regions, of_sequence):
            kept |= keys
    for node, region in regions.items():
        if region and node.meta.get("recompute") in DROPS and not _storages(node) & kept:
            node.meta[CHECKPOINT] = region


def _region_of(node: fx.Node) -> int:
    """Return the number of the region that a node of the forward is in; 0: none."""
    return int(node.meta.get("ac_graph_id") or 0) if node.op == "call_function" and not is_backward(node) else 0


def _is_kept(node: fx.Node, regions: dict[fx.Node, int], of_sequence: dict[int | None, int]) -> bool:
    """Return whether one of its uses makes eager keep a result of the forward until the backward."""
    if is_backward(node):
        return False
    region = regions[node]
    if region and node.meta.get("recompute") not in DROPS:
        return True
    for user in node.users:
        if user.op == "output" or (is_backward(user) and not of_sequence.get(user.meta.get("seq_nr"))):
            return True
        if not is_backward(user) and regions[user] and regions[user] != region:
            return True
    return False


def _storages(node: fx.Node) -> set[int]:
    """Return the keys of the memory that the results of a node have."""
    val = node.meta.get("val")
    results = val if isinstance(val, (tuple, list)) else (val,)
    return {storage_key(result) for result in results if isinstance(result, torch.Tensor)}
