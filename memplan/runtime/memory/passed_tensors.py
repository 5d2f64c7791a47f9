"""`PassedTensors`: recognises the tensors that graphs, and models, pass to each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class PassedTensors:
    """The tensors that graphs or models have returned, by their storages, as long as these are alive."""

    def __init__(self) -> None:
        self._returned: dict[int, tuple[StorageWeakRef, Hashable]] = {}

    def taken(self, inputs: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
        """Return a key of each input: that of the result that it is, or of its own storage."""
        found: list[Hashable] = []
        for x in inputs:
            address = x.untyped_storage()._cdata
            ref, key = self._returned.get(address, (None, None))
            found.append(("input", address) if ref is None or ref.expired() else key)  # type: ignore[no-untyped-call]
        return tuple(found)

    def returned(self, results: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
        """Return a key of each result, by which later inputs are recognised: that of an earlier call if it has one."""
        alive = {a: entry for a, entry in self._returned.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        keys: list[Hashable] = []
        for storage in (result.untyped_storage() for result in results):
            new = StorageWeakRef(storage), object()  # type: ignore[no-untyped-call]
            keys.append(alive.setdefault(storage._cdata, new)[1])
        self._returned = alive
        return tuple(keys)
