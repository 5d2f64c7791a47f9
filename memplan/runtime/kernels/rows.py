"""Rows by their numbers: `x[index]` and its gradient, by kernels that move whole rows where torch's own go element by
element (five times as fast on the CPU).

Both give the same bits: one copies, the other adds up in the order of the index. Negative numbers, which count from
the end, and those out of range they do not take; then the kernel that was traced runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.core.graph import Graph
from memplan.trace.traced import KernelCall, Ref

_WORTH = 1 << 15  # bytes of what is added, below which looking at the index costs more than it wins
_FULL = ("float32", "float64")  # in half precision the two kernels round differently


def takes_rows(kernel: KernelCall, graph: Graph) -> Callable[..., Any] | None:
    """What runs `aten.index.Tensor` into `out`, when it takes rows of a tensor by one list of numbers, on the CPU."""
    if kernel.target is not torch.ops.aten.index.Tensor or not _one_list(graph, kernel.args[1]):
        return None
    return _take if _on_cpu(graph, kernel.args[0]) else None


def adds_rows(kernel: KernelCall, graph: Graph) -> Callable[..., Any] | None:
    """What runs `aten.index_put_`, when it adds rows to those of a tensor by one list of numbers, on the CPU."""
    if kernel.target is not torch.ops.aten.index_put_.default or kernel.args[3:] != (True,):
        return None
    x, indices, source = kernel.args[:3]
    if not (_one_list(graph, indices) and _on_cpu(graph, x)):
        return None
    whole, added, index = (graph.values[ref.value] for ref in (x, source, indices[0]))
    if whole.dtype not in _FULL or len(whole.shape) < 2 or added.shape != (*index.shape, *whole.shape[1:]):
        return None
    return _add if graph.storages[added.storage].nbytes >= _WORTH else None


def _one_list(graph: Graph, indices: Sequence[Any]) -> bool:
    if len(indices) != 1 or not isinstance(indices[0], Ref):
        return False
    index = graph.values[indices[0].value]
    return index.dtype == "int64" and len(index.shape) == 1


def _on_cpu(graph: Graph, ref: Ref) -> bool:
    value = graph.values[ref.value]
    return bool(value.shape) and graph.storages[value.storage].device.startswith("cpu")


def _take(x: torch.Tensor, indices: Sequence[torch.Tensor], *, out: torch.Tensor) -> torch.Tensor:
    try:
        return torch.index_select(x, 0, indices[0], out=out)
    except (IndexError, RuntimeError):  # a negative number, or one out of range: as the traced kernel says it
        taken: torch.Tensor = torch.ops.aten.index.Tensor_out(x, indices, out=out)
        return taken


def _add(x: torch.Tensor, indices: Sequence[torch.Tensor], source: torch.Tensor, _: bool) -> torch.Tensor:
    index = indices[0]
    if index.numel():
        low, high = index.aminmax()
        if low.item() >= 0 and high.item() < x.shape[0]:
            return x.index_add_(0, index, source)
    return x.index_put_(tuple(indices), source, accumulate=True)
