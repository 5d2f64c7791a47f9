"""Find the updates that one call can make: torch's fused optimizer kernels take lists of tensors."""

from __future__ import annotations

from collections.abc import Hashable

from memplan.core.graph import Graph, Op, StorageKind
from memplan.trace.passes.rewrite import aten
from memplan.trace.traced import KernelCall, Ref, TracedGraph

_UPDATES = (aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_)
_SMALL = (16 << 10, 1 << 20)  # bytes of a parameter, on the CPU and elsewhere, where a call is a launch


def kind_of(kernel: KernelCall, graph: Graph) -> Hashable:
    """Return what the updates of one call must have in common; None for a kernel that is no update.

    That is the kernel, all arguments that are no tensors, and the dtypes and devices of the tensors.
    """
    if kernel.target.overloadpacket not in _UPDATES:
        return None
    lists = tuple(tuple(_like(graph, ref) for ref in of) for of in kernel.args)
    return str(kernel.target), tuple(kernel.kwargs.items()), lists


def _like(graph: Graph, ref: Ref) -> tuple[str, str]:
    """Return the dtype and the device of a kernel argument."""
    value = graph.values[ref.value]
    return value.dtype, graph.storages[value.storage].device


def small_updates(traced: TracedGraph) -> dict[int, Hashable]:
    """Return the kinds of the updates (by op) that take longer to call than to compute: they gain from running
    together.
    """
    graph, kinds = traced.graph, dict[int, Hashable]()
    for index, kernel in enumerate(traced.kernels):
        kind = kind_of(kernel, graph) if isinstance(kernel, KernelCall) else None
        if kind is not None and _parameter_bytes(graph, graph.ops[index]) <= _SMALL[traced.device.type != "cpu"]:
            kinds[index] = kind
    return kinds


def _parameter_bytes(graph: Graph, op: Op) -> int:
    """Return the bytes of the parameter that an op updates."""
    storages = (graph.storages[s] for s in graph.written(op))
    return sum(s.nbytes for s in storages if s.kind is StorageKind.PARAMETER)
