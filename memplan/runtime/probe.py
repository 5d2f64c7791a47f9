"""Trying callables: whether one gives the same bytes as another, and where it is told to.

Throw-away results lie in memory that cannot be resized, so that a kernel which would resize its `out=` is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memplan.graph import Graph
from memplan.runtime.arena import Memory, view_of

Function = Callable[..., Any]
# How a binding says that it does not take these arguments.
_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError)


def writes(
    function: Function, args: Any, kwargs: Mapping[str, Any], scratch: Sequence[torch.Tensor], expected: Sequence[Any]
) -> bool:
    """Whether `function`, whose out arguments are among `kwargs` and are the tensors of `scratch`, fills these with
    the bytes of `expected` and leaves them where they are."""
    before = [(t.data_ptr(), t.shape, t.stride()) for t in scratch]
    try:
        function(*args, **kwargs)
    except _REFUSALS:
        return False
    if [(t.data_ptr(), t.shape, t.stride()) for t in scratch] != before:
        return False
    return all(same_bytes(ours, theirs) for ours, theirs in zip(scratch, expected, strict=True))


def returns(function: Function, args: Any, kwargs: Mapping[str, Any], expected: Sequence[Any]) -> bool:
    """Whether `function` returns what has the bytes of `expected`."""
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
    """Same dtype, shape and bits (NaN equals NaN, 0.0 is not -0.0), whatever the strides."""
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    if one.dtype == torch.bool:
        return torch.equal(one, two)
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, two)]
    return torch.equal(*flat)


def scratch(graph: Graph, index: int) -> torch.Tensor:
    """Throw-away memory with the layout of a value, in a storage that cannot be resized, filled with 0xFF."""
    value = graph.values[index]
    storage = graph.storages[value.storage]
    memory = Memory(storage.nbytes, torch.device(storage.device))
    memory.memory.fill_(255)
    made = view_of(memory.storage(0, storage.nbytes), value)
    made.arena = memory  # type: ignore[attr-defined]  # keeps the bytes alive as long as the tensor
    return made


def as_tuple(result: Any) -> tuple[Any, ...]:
    """The results of an op that returns one, or a sequence of them."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
