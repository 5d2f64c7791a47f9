"""The kind of a call: what decides whether two calls of a function can run the same program."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

CallKind = tuple[str, tuple[Hashable, ...]]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """The layout of a tensor, its type, its device and whether it requires a gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __str__(self) -> str:
        grad = ", requires a gradient" if self.requires_grad else ""
        return f"{self.dtype} {self.shape} (strides {self.strides}) on {self.device}{grad}"


def kind_of(leaf: Any) -> Hashable:
    """Return the kind of a tensor, the text of a value, or that of its type where an object has no text of its own."""
    if isinstance(leaf, torch.Tensor):
        return TensorKind(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    shown: Any = type(leaf).__repr__
    return str(type(leaf)) if shown is object.__repr__ else repr(leaf)


def kind_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
    """Return the structure of a call, and the kind of each of its leaves."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), tuple(map(kind_of, leaves))
