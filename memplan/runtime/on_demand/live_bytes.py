"""Counts the live bytes that a step allocated on a device, storage by storage, while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LiveBytes:
    """The live bytes of storages on `device` that were added. `peak`: the most bytes that were alive at once.

    Freed storages are subtracted only when the number is needed; until then, the bytes that were alive at the last
    count and all that were added since are an upper bound.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._at_most = 0

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    @property
    def nbytes(self) -> int:
        """The bytes that are alive now."""
        for key, (weak, nbytes) in list(self._known.items()):
            if weak.expired():  # type: ignore[no-untyped-call]
                del self._known[key]
                self._at_most -= nbytes
        return self._at_most

    def exceeds(self, limit: int) -> bool:
        """Return whether more than `limit` bytes are alive."""
        return self._at_most > limit and self.nbytes > limit

    def add(self, tensors: Sequence[Any]) -> None:
        """Count the storages of these tensors."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device == self.device and is_plain(tensor):
                storage = tensor.untyped_storage()
                weak, nbytes = self._known.get(storage._cdata, (None, 0))
                if weak is None or weak.expired():  # type: ignore[no-untyped-call]
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
                    self._at_most += storage.nbytes() - nbytes
        if self.exceeds(self.peak):
            self.peak = self._at_most


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a plain strided tensor: no subclass, no lazy conjugate or negation, not quantized."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    )
