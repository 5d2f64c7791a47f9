"""Replaces whole parameters in a captured graph by this rank's parts: gathered before use, their gradients reduced.

A gather stands right before the first op that reads the parameter, a reduction right after the gradient. A parameter
that torch frees after the forward is marked as an activation checkpoint of its own: a plan without a budget gathers it
again in the backward, as torch does; under a budget that is the plan's choice (`memplan.core.collectives`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, ParamAOTInput

from memplan.distributed.parallelism import Shard
from memplan.trace.passes.own_outputs import after_last, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, replace_by, storage_key, value

_ops = torch.ops.memplan_distributed


def gather_parameters(graph: fx.Graph, shards: Mapping[str, Shard]) -> None:
    """Replace each placeholder of a sharded parameter by one of this rank's part, gathered before its first use."""
    mode = fake_mode_of(graph)
    parts: dict[int, torch.Tensor] = {}  # by the storage of the whole one, which tied parameters share
    region = max((int(node.meta.get("ac_graph_id") or 0) for node in graph.nodes), default=0)
    for node in list(graph.find_nodes(op="placeholder")):
        shard = _shard_of(node.meta["desc"], shards)
        if shard is None:
            continue
        with graph.inserting_before(node):
            part = graph.placeholder(f"{node.name}_shard")
        part.meta.update(node.meta)
        key = storage_key(value(node))
        if key not in parts:
            with mode:
                parts[key] = torch.empty(shard.local, dtype=shard.dtype, device=value(node).device)
        part.meta["val"] = parts[key]
        first = next((n for n in graph.nodes if n in node.users), None)
        if first is None:
            graph.erase_node(node)
            continue
        rw = Rewriter(graph, mode, first)
        region += 1
        rw.checkpoint = region if shard.reshards else 0
        given = part
        if shard.uneven:
            given = rw.call(aten.constant_pad_nd.default, given, _padding(shard, shard.rows - shard.local[0]))
        if shard.gathered != shard.dtype:
            given = rw.call(aten._to_copy.default, given, dtype=shard.gathered)
        rw.label = f"gather_{_word(shard.name)}"
        whole = rw.call(_ops.gather_parameter.default, given, shard.ranks, shard.group)
        rw.label = ""
        if shard.uneven:
            whole = rw.call(aten.slice.Tensor, whole, 0, 0, shard.shape[0])
        replace_by(graph, node, whole)


def reduce_gradients(graph: fx.Graph, shards: Mapping[str, Shard]) -> None:
    """Replace each returned gradient of a sharded parameter by this rank's part of the reduced one."""
    output, results, descs = returned_by(graph)
    for i, (node, desc) in enumerate(zip(results, descs, strict=True)):
        shard = _shard_of(desc.grad_of, shards) if isinstance(desc, GradAOTOutput) else None
        if shard is not None and isinstance(node, fx.Node):
            results[i] = _reduced(graph, node, shard)
    output.args = (tuple(results),)


def _reduced(graph: fx.Graph, gradient: fx.Node, shard: Shard) -> fx.Node:
    """Return this rank's part of the sum of a gradient over the ranks, divided as torch divides it."""
    rw = Rewriter(graph, fake_mode_of(graph), gradient, before=after_last(graph, [gradient]))
    rw.phase = "is_backward"
    node = gradient
    if value(node).dtype != shard.reduced:
        node = rw.call(aten._to_copy.default, node, dtype=shard.reduced)
    if not value(node).is_contiguous():
        node = rw.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    if shard.uneven:
        node = rw.call(aten.constant_pad_nd.default, node, _padding(shard, shard.rows * shard.ranks - shard.shape[0]))
    if shard.before not in (None, 1):
        node = rw.call(aten.div.Tensor, node, shard.before)
    rw.label = f"reduce_{_word(shard.name)}"
    node = rw.call(_ops.reduce_scatter.default, node, shard.how, shard.ranks, shard.reduces)
    rw.label = ""
    if shard.after not in (None, 1):
        node = rw.call(aten.div.Tensor, node, shard.after)
    if shard.reduced != shard.dtype:
        node = rw.call(aten._to_copy.default, node, dtype=shard.dtype)
    if shard.local[0] != shard.rows:
        node = rw.call(aten.slice.Tensor, node, 0, 0, shard.local[0])
    return node


def _shard_of(desc: object, shards: Mapping[str, Shard]) -> Shard | None:
    """Return the shard of what a descriptor describes; None if that is no sharded parameter."""
    return shards.get(desc.target) if isinstance(desc, ParamAOTInput) else None


def _padding(shard: Shard, rows: int) -> list[int]:
    """Return the argument of `constant_pad_nd` that adds rows of zeros at the end."""
    return [0, 0] * (len(shard.shape) - 1) + [0, rows]


def _word(name: str) -> str:
    """Return a parameter's name as a part of the name of a node."""
    return name.replace(".", "_")
