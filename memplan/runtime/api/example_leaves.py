"""The example of a compiled module without its tensors, which would stay in memory: others like them can be made.

A module is compiled once more from its example, as when gradients of the last step are still in use at the next call,
and copies of it are compiled from it. They are traced for the layout of the example, and tried on tensors of that
layout, whose numbers are in the range of the example's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memplan.trace.passes.nodes import may_overlap

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLike:
    """The layout of a tensor that is not kept, with the least and the greatest of its numbers.

    `empty`: a tensor without numbers on its device, which `torch.load` moves where `map_location` says.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    empty: torch.Tensor
    requires_grad: bool
    low: float
    high: float

    @property
    def device(self) -> torch.device:
        """The device of the tensor."""
        return self.empty.device

    def tensor(self) -> torch.Tensor:
        """Return a tensor of that layout with random numbers of that range, always the same ones."""
        numbers = torch.Generator().manual_seed(0)
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        if self.dtype in _FLOATS:
            made.uniform_(self.low, self.high, generator=numbers).clamp_(self.low, self.high)
        else:
            made.random_(int(self.low), int(self.high) + 1, generator=numbers)
        if self.device.type != "cpu":
            there = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            made = there.copy_(made)
        return made.requires_grad_(self.requires_grad)


def without_tensors(leaves: Sequence[Any], others: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """Return the leaves of an example with a `TensorLike` in place of each tensor that it can stand for.

    It cannot stand for tensors that share memory with one another or with `others`, nor for those of types and numbers
    that are not made up: these are kept.
    """
    tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    uses = Counter(x.untyped_storage().data_ptr() for x in tensors)
    uses.update({x.untyped_storage().data_ptr() for x in others if x.layout is torch.strided})
    return tuple(_like(x, uses) if isinstance(x, torch.Tensor) else x for x in leaves)


def _like(x: torch.Tensor, uses: Counter[int]) -> Any:
    """Return what stands for a tensor; the tensor itself, without its autograd history, if nothing can."""
    plain = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_conj() or x.is_neg())
    if not plain or x.dtype not in (*_FLOATS, *_INTEGERS, torch.bool) or may_overlap(x.shape, x.stride()):
        return detached(x)
    if x.device.type != "cpu" and x.dtype not in _FLOATS:  # a wrong index there would stop the device for good
        return detached(x)
    if x.numel() and uses[x.untyped_storage().data_ptr()] > 1:
        return detached(x)
    low, high = _range_of(x.detach()) if x.numel() else (0.0, 0.0)
    if not math.isfinite(high - low) or abs(high) > _most(x.dtype) or abs(low) > _most(x.dtype):
        return detached(x)
    return TensorLike(
        shape=tuple(x.shape),
        strides=x.stride(),
        dtype=x.dtype,
        empty=torch.empty(0, device=x.device),
        requires_grad=x.requires_grad,
        low=low,
        high=high,
    )


def _range_of(x: torch.Tensor) -> tuple[float, float]:
    """Return the least and the greatest number of a tensor."""
    low, high = x.aminmax()
    return low.item(), high.item()


def _most(dtype: torch.dtype) -> float:
    """Return the greatest number of a type up to which a range of numbers can be drawn from."""
    if dtype is torch.bool:
        return 1
    return torch.finfo(dtype).max / 4 if dtype in _FLOATS else min(torch.iinfo(dtype).max, 2**53)


def with_tensors(example: Any) -> Any:
    """Return an example with a tensor in place of each `TensorLike`."""
    return pytree.tree_map(lambda x: x.tensor() if isinstance(x, TensorLike) else x, example)


def is_made_up(example: Any) -> bool:
    """Return whether a tensor of the example is not kept."""
    return any(isinstance(x, TensorLike) for x in pytree.tree_leaves(example))


def detached(x: Any) -> Any:
    """Return a tensor without its autograd history; return anything else unchanged."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
