"""Captures a model that is divided among ranks, or copied to them, with its collectives.

The model is traced as if it were on one rank, from a copy without torch's hooks, on fake tensors; the collectives are
then added to the graph, beside those that tensor parallelism has there. A parameter is gathered once and its gradient
reduced once, however often the model reads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from memplan.distributed.parallelism import Parallelism
from memplan.distributed.whole_copy import whole_copy
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.collectives.local_parts import with_parts
from memplan.trace.collectives.replicated import average_gradients, broadcast_buffers
from memplan.trace.collectives.sharded import gather_parameters, reduce_gradients


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
