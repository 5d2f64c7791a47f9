"""Counts the bytes of the storages that ops make, on tensors that have no bytes: meta tensors and fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memplan.torch_inside.graphs import FakeTensor

_NUMBERS = {torch.bool: True}  # what a number that is read from a meta tensor is taken for; other types: 1


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the identity of a tensor's storage, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages without bytes that are made while it is on, as long as they are alive.

    `live` is the sum now, `peak` the most, `known` are the storages that are alive. A number that is read from a meta
    tensor is 1: meta tensors have none.

    Args:
        known: The identities of storages that exist already, which do not count.
    """

    def __init__(self, known: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = set(known)
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and count its new results."""
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return _NUMBERS.get(args[0].dtype, 1.0 if args[0].dtype.is_floating_point else 1)
        out = self.run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.Tensor) and leaf.is_meta):
                self._count(leaf)
        self.ran(func, args, kwargs or {})
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of an op."""
        return func(*args, **kwargs)

    def ran(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called when an op has run, and its results are counted."""

    def _count(self, tensor: torch.Tensor) -> None:
        key, nbytes = storage_of(tensor)
        if key not in self.known:
            self.known.add(key)
            self.live += nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(tensor.untyped_storage(), self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.live -= nbytes
