"""Whether tensors are laid out as they were: one call into the checks that dynamo guards its own code with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards


class LayoutGuards:
    """Remembers class, shape, strides, dtype, device, dispatch keys and `requires_grad` of tensors.

    `alike.check(*others)` is True only when `others` (as many) are the same in all of that, in the same state of the
    thread (autocast, inference mode). False proves nothing: look closer. Nothing is kept alive.
    """

    __slots__ = ("_guards", "_single", "_twins", "check")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first: dict[int, int] = {}  # the guards refuse to see a tensor twice
        pairs = [(i, first.setdefault(id(t), i)) for i, t in enumerate(tensors)]
        self._twins = [(i, j) for i, j in pairs if i != j]
        self._single = [i for i, j in pairs if i == j]
        once = [tensors[i] for i in self._single]
        self._guards: Any = TensorGuards(*once, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        self.check: Callable[..., bool] = self._check if self._twins else self._guards

    def _check(self, *tensors: Any) -> bool:
        if any(tensors[i] is not tensors[j] for i, j in self._twins):
            return False
        alike: bool = self._guards(*(tensors[i] for i in self._single))
        return alike
