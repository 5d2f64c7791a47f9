"""Find the values and storages of a graph by its fake tensors: a storage is an alias class of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memplan.core.graph import Origin, Storage, StorageKind, Value
from memplan.errors import UnsupportedGraph
from memplan.trace.passes.rewrite import storage_key

_MADE = (StorageKind.ACTIVATION, StorageKind.GRADIENT, StorageKind.OUTPUT)


class AliasClasses:
    """The values and storages found so far, each by its index; `SymbolicAliasClasses` has sizes that vary."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.start_of: list[int] = []  # by storage: the offset (elements) at which its first value begins
        self._storage_of: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # a storage key is an address, which is reused unless its tensor is kept

    def storage(self, val: torch.Tensor, name: str, kind: StorageKind, *, planned: bool, origin: Origin) -> int:
        """Return the storage of a tensor: a new one, called `name`, if it aliases none of the earlier ones."""
        key = storage_key(val)
        if key not in self._storage_of:
            self._storage_of[key] = len(self.storages)
            # A fake result may begin after the start of its storage, depending on what was traced before.
            self.start_of.append(self.whole(val.storage_offset(), name) if kind in _MADE else 0)
            self._alive.append(val)
            self.storages.append(
                Storage(name=name, nbytes=0, device=str(val.device), kind=kind, planned=planned, origin=origin)
            )
        return self._storage_of[key]

    def value(self, val: torch.Tensor, name: str, storage: int) -> int:
        """Add a value of `storage` and return its index. Raises `UnsupportedGraph` for what is not plain strided
        memory.
        """
        if val.layout is not torch.strided or val.is_conj() or val.is_neg() or val.is_quantized:
            raise UnsupportedGraph(
                name,
                f"a tensor that is not plain strided memory ({val.layout})",
                "use dense real tensors",
                see="strided",
            )
        self.values.append(
            Value(
                name=name,
                storage=storage,
                dtype=str(val.dtype).removeprefix("torch."),
                shape=tuple(self.whole(n, name) for n in val.shape),
                strides=tuple(self.whole(n, name) for n in val.stride()),
                offset=self.whole(val.storage_offset(), name) - self.start_of[storage],
            )
        )
        return len(self.values) - 1

    def whole(self, size: Any, name: str) -> int:
        """Return a size as a number. Raises `UnsupportedGraph` for an unknown one; `name` is the node that has it."""
        if not isinstance(size, int):
            raise UnsupportedGraph(name, "a size that depends on data", "use fixed shapes", see="data-dependent-size")
        return size

    def sized(self) -> tuple[Storage, ...]:
        """Return the storages with the bytes that their values span.

        A fake storage may be larger than its tensor, by an amount that depends on what was traced before.
        """
        spans = [0] * len(self.storages)
        for v in self.values:
            last = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True))
            elements = 0 if 0 in v.shape else v.offset + last + 1
            spans[v.storage] = max(spans[v.storage], elements * getattr(torch, v.dtype).itemsize)
        return tuple(replace(s, nbytes=nbytes) for s, nbytes in zip(self.storages, spans, strict=True))
