"""Selects kernels before the arena exists, on stand-ins for the tensors that will be in it.

Trying a kernel takes up to two more results than running it. Beside the arena they could exceed a budget that the step
itself keeps; before it is allocated, there is room for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.utils._pytree as pytree

from memplan.core.graph import Value
from memplan.runtime.kernels.kernel_selection import KernelSelector
from memplan.runtime.memory.arena import dtype_of
from memplan.trace.traced import KernelCall, OpaqueResult, TracedGraph

_SEED = 0
_aten = torch.ops.aten
# Ops for which 0 is a valid index or class. Other kernels might read far away for lengths that do not fit each other.
_TAKES_INDICES = frozenset(
    (
        _aten.nll_loss_forward.default,
        _aten.nll_loss_backward.default,
        _aten.nll_loss2d_forward.default,
        _aten.nll_loss2d_backward.default,
        _aten.max_pool2d_with_indices_backward.default,
        _aten.embedding.default,
        _aten.embedding_dense_backward.default,
        _aten.gather.default,
        _aten.scatter_add.default,
        _aten.index_select.default,
    )
)


def select_on_stand_ins(
    traced: TracedGraph,
    order: Sequence[int],
    known: Mapping[int, torch.Tensor],
) -> KernelSelector:
    """Return a selector that knows the callables of the ops that can be tried on stand-ins.

    Parameters, buffers, constants and example inputs are themselves (`known`: values, by index). Other floating-point
    values are random numbers, masks are False, and indices are 0, one op's at a time. Ops that read other integers, or
    that refuse these, are left to be tried on real data.
    """
    selector = KernelSelector(traced.graph)
    generator = torch.Generator(device=traced.device).manual_seed(_SEED)
    tensors: list[torch.Tensor | None] = [None] * (len(traced.graph.values) + traced.opaque_count)
    for op in order:
        kernel = traced.kernels[op]
        if not isinstance(kernel, KernelCall) or not kernel.outs or _takes_opaque(kernel):
            continue
        values = [(v, traced.graph.values[v]) for v in traced.graph.ops[op].reads]
        if selector.knows(kernel) or not all(v in known or _can_stand_in(value, kernel) for v, value in values):
            continue
        for v, value in values:
            tensors[v] = known[v] if v in known else _stand_in(value, traced, generator)
        try:
            selector.select(kernel, tensors)
        except Exception:  # of any kind: the data are not the model's, and real data will be tried
            continue
        finally:
            for v, _ in values:
                tensors[v] = None
    return selector


def _takes_opaque(kernel: KernelCall) -> bool:
    return any(isinstance(leaf, OpaqueResult) for leaf in pytree.tree_leaves((kernel.args, kernel.kwargs)))


def _can_stand_in(value: Value, kernel: KernelCall) -> bool:
    dtype = dtype_of(value)
    integers = not dtype.is_floating_point and dtype != torch.bool
    return not dtype.is_complex and not (integers and kernel.target not in _TAKES_INDICES)


def _stand_in(value: Value, traced: TracedGraph, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers, or zeros, in the layout of a value, which may overlap itself."""
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True))
    device = torch.device(traced.graph.storages[value.storage].device)
    made = torch.zeros(max(last + 1, 0), dtype=dtype_of(value), device=device)
    if made.is_floating_point():
        made.uniform_(generator=generator)
    return made.as_strided(value.shape, value.strides)
