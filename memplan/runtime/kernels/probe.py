"""Tries callables: checks whether one gives the same bytes as another, and writes them to its out arguments.

Scratch results are in memory that cannot be resized, so that a kernel that resizes its `out=` fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.core.graph import Graph
from memplan.runtime.memory.arena import Memory, view_of

Function = Callable[..., Any]
# The errors that a binding raises for arguments that it does not take.
_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)


def writes(
    function: Function, args: Any, kwargs: Mapping[str, Any], scratch: Sequence[torch.Tensor], expected: Sequence[Any]
) -> bool:
    """Return whether `function` writes the bytes of `expected` to its out arguments, and does not move or resize them.

    The out arguments are the tensors of `scratch`, which are also in `kwargs`.
    """
    before = [(t.data_ptr(), t.shape, t.stride()) for t in scratch]
    try:
        if _resizes(function, args, kwargs, scratch):
            return False
        function(*args, **kwargs)
    except _REFUSALS:
        return False
    if [(t.data_ptr(), t.shape, t.stride()) for t in scratch] != before:
        return False
    return all(same_bytes(ours, theirs) for ours, theirs in zip(scratch, expected, strict=True))


def _resizes(function: Function, args: Any, kwargs: Mapping[str, Any], scratch: Sequence[torch.Tensor]) -> bool:
    """Return whether a zero-dimensional result is larger at first, as that of `binary_cross_entropy` is.

    torch would print a warning that Python cannot catch; it prints none for results that are still empty.
    """
    if not any(t.dim() == 0 for t in scratch):
        return False
    empty = [torch.empty(0, dtype=t.dtype, device=t.device) for t in scratch]
    made = dict(zip(map(id, scratch), empty, strict=True))
    function(*args, **pytree.tree_map(lambda x: made.get(id(x), x), dict(kwargs)))
    return any(e.untyped_storage().nbytes() > t.nbytes for t, e in zip(scratch, empty, strict=True) if t.dim() == 0)


def returns(function: Function, args: Any, kwargs: Mapping[str, Any], expected: Sequence[Any]) -> bool:
    """Return whether `function` returns the bytes of `expected`."""
    try:
        results = as_tuple(function(*args, **kwargs))
    except _REFUSALS:
        return False
    if len(results) != len(expected):
        return False
    pairs = zip(results, expected, strict=True)
    return all(_same(a, b) for a, b in pairs)


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return same_bytes(one, two)
    return type(one) is type(two) and bool(one == two)


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors of any strides have the same dtype, shape and bits (NaN is NaN, 0.0 is not -0.0)."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.dtype == torch.bool:
        return torch.equal(one, two)
    return torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in order, as bytes. Tensors of 0 or 1 elements may have any strides."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def scratch(graph: Graph, index: int) -> torch.Tensor:
    """Return a scratch tensor with the layout of a value, in a storage that cannot be resized, filled with 0xFF."""
    value = graph.values[index]
    storage = graph.storages[value.storage]
    memory = Memory(storage.nbytes, torch.device(storage.device))
    memory.memory.fill_(255)
    made = view_of(memory.storage(0, storage.nbytes), value)
    made.arena = memory  # type: ignore[attr-defined]  # keeps the bytes alive as long as the tensor
    return made


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return the results of an op as a tuple."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
