"""Captures a model that is divided among ranks, or copied to them, with its collectives.

The model is traced as if it were on one rank, from a copy without torch's hooks, on fake tensors; the collectives are
then added to the graph, beside those that tensor parallelism has there. A parameter is gathered once and its gradient
reduced once, however often the model reads it: a gather stands right before the first op that reads the parameter, a
reduction right after the gradient. A parameter that torch frees after the forward is marked as an activation
checkpoint of its own: a plan without a budget gathers it again in the backward, as torch does; under a budget that is
the plan's choice (`memplan.core.collectives`). The gradients of copies are averaged in buckets, as DDP's are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from memplan.distributed.parallelism import Parallelism, Replicas, Shard
from memplan.distributed.whole_copy import whole_copy
from memplan.torch_inside.graphs import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
)
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.collectives.local_parts import with_parts
from memplan.trace.passes.own_outputs import after_last, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, redirect, replace_by, storage_key, value

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


def average_gradients(graph: fx.Graph, replicas: Replicas) -> None:
    """Replace the returned gradients of the model's parameters by their averages over the ranks."""
    output, results, descs = returned_by(graph)
    at = {node: i for i, node in enumerate(graph.nodes)}
    found = [
        (at[node], i)
        for i, (node, desc) in enumerate(zip(results, descs, strict=True))
        if isinstance(node, fx.Node) and isinstance(desc, GradAOTOutput) and _is_replicated(desc.grad_of, replicas)
    ]
    ordered = [i for _, i in sorted(found)]
    for number, bucket in enumerate(_buckets([results[i] for i in ordered], replicas)):
        averaged = _averaged(graph, [results[ordered[j]] for j in bucket], replicas, number)
        for j, node in zip(bucket, averaged, strict=True):
            results[ordered[j]] = node
    output.args = (tuple(results),)


def broadcast_buffers(graph: fx.Graph, replicas: Replicas) -> None:
    """Let the forward read the first rank's buffers, and copy them to this rank's, whether the model reads them or not.

    Torch copies them before each forward: a rank that has written to one of its own has the first rank's after it.
    """
    output, results, descs = returned_by(graph)
    changed = {desc.mutated_input for desc in descs if isinstance(desc, InputMutationAOTOutput)}
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for node in list(graph.find_nodes(op="placeholder")):
        desc = node.meta["desc"]
        if isinstance(desc, BufferAOTInput) and desc.target in replicas.buffers:
            rw = Rewriter(graph, fake_mode_of(graph), node, before=first)
            rw.label, rw.phase = f"broadcast_{desc.target.replace('.', '_')}", "is_forward"
            given = rw.call(_ops.broadcast.default, node, 0, replicas.group)
            redirect(graph, node, given)
            if desc not in changed:
                results.append(given)
                descs.append(InputMutationAOTOutput(desc))
    output.args = (tuple(results),)
    output.meta["desc"] = descs


def _is_replicated(desc: object, replicas: Replicas) -> bool:
    return isinstance(desc, ParamAOTInput) and desc.target in replicas.parameters


def _buckets(gradients: list[fx.Node], replicas: Replicas) -> list[list[int]]:
    """Return the gradients (by position) of each bucket: of one type, and of so many bytes at most, or alone."""
    buckets: list[list[int]] = []
    taken, limit, dtype = 0, replicas.first_bucket_bytes, None
    for i, node in enumerate(gradients):
        v = value(node)
        nbytes = v.numel() * v.element_size()
        if not buckets or v.dtype != dtype or taken >= limit:
            limit = replicas.bucket_bytes if buckets else replicas.first_bucket_bytes
            buckets.append([])
            taken, dtype = 0, v.dtype
        buckets[-1].append(i)
        taken += nbytes
    return buckets


def _averaged(graph: fx.Graph, gradients: list[fx.Node], replicas: Replicas, number: int) -> list[fx.Node]:
    """Return the averages of the gradients of one bucket, which is multiplied by 1 / ranks and then summed."""
    rw = Rewriter(graph, fake_mode_of(graph), gradients[-1], before=after_last(graph, gradients))
    rw.phase = "is_backward"
    flat = [_flat(rw, g) for g in gradients]
    bucket = flat[0] if len(flat) == 1 else rw.call(aten.cat.default, flat)
    scaled = rw.call(aten.mul.Tensor, bucket, 1.0 / replicas.ranks)
    rw.label = f"reduce_bucket_{number}"
    whole = rw.call(_ops.all_reduce.default, scaled, "sum", replicas.group)
    rw.label = ""
    found, start = [], 0
    for g in gradients:
        shape = list(value(g).shape)
        end = start + math.prod(shape)
        piece = whole if len(flat) == 1 else rw.call(aten.slice.Tensor, whole, 0, start, end)
        found.append(rw.call(aten.view.default, piece, shape))
        start = end
    return found


def _flat(rw: Rewriter, gradient: fx.Node) -> fx.Node:
    """Return a gradient as a tensor of one dimension."""
    if not value(gradient).is_contiguous():
        gradient = rw.call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
    return rw.call(aten.view.default, gradient, [-1])


def capture_parallel(
    model: nn.Module, parallelism: Parallelism, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> Captured:
    """Return the graph of one rank. The arguments and errors are those of `capture`."""
    settle = partial(with_parts, placed=parallelism.placed) if parallelism.placed else None
    made = capture(
        whole_copy(model, parallelism),
        args,
        kwargs,
        train=train,
        device=parallelism.device,
        sharing=True,
        settle=settle,
    )
    graph = made.graph_module.graph
    gather_parameters(graph, parallelism.shards)
    if train:
        reduce_gradients(graph, parallelism.shards)
    if parallelism.replicas is not None:
        if train:
            average_gradients(graph, parallelism.replicas)
        broadcast_buffers(graph, parallelism.replicas)
    return made
