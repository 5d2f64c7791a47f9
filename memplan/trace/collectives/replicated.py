"""Averages the gradients of a model of which each rank has a copy, in buckets, as `DistributedDataParallel` does.

A bucket takes gradients in the order in which the backward makes them, and is reduced when it is full: the gradients in
it are free from then on, and the updates of its parameters can follow at once.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
)

from memplan.distributed.parallelism import Replicas
from memplan.trace.passes.own_outputs import after_last, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, redirect, value

_ops = torch.ops.memplan_distributed


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
