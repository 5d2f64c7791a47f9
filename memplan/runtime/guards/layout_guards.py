"""Checks whether tensors have the layout that they had, by one call of the guards that dynamo uses for its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards


class LayoutGuards:
    """Stores class, shape, strides, dtype, device, dispatch keys and `requires_grad` of tensors.

    `check(*others)` is True only if `others` (as many) agree in all of these, in the same state of the thread
    (autocast, inference mode). If it is False, they may still agree: compare them one by one. Tensors are not kept
    alive.
    """

    __slots__ = ("_duplicates", "_guards", "_single", "check")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first: dict[int, int] = {}  # `TensorGuards` does not accept a tensor twice
        pairs = [(i, first.setdefault(id(t), i)) for i, t in enumerate(tensors)]
        self._duplicates = [(i, j) for i, j in pairs if i != j]
        self._single = [i for i, j in pairs if i == j]
        once = [tensors[i] for i in self._single]
        self._guards: Any = TensorGuards(*once, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.check: Callable[..., bool] = self._check if self._duplicates else self._guards

    def _check(self, *tensors: Any) -> bool:
        if any(tensors[i] is not tensors[j] for i, j in self._duplicates):
            return False
        same: bool = self._guards(*(tensors[i] for i in self._single))
        return same
