"""Holds the tensors that autograd saves in a call with on-demand offload; they may be offloaded and fetched again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from memplan.devices.host_memory import host_bytes
from memplan.errors import StaleActivationsError


class SavedBlock:
    """The bytes of a saved storage, on the device or on the host; `fetch` allocates memory on the device for them."""

    def __init__(self, fetch: Callable[[int], torch.UntypedStorage], nbytes: int) -> None:
        self.fetch, self.nbytes = fetch, nbytes
        self.saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self.host: torch.Tensor | None = None
        self.back: torch.UntypedStorage | None = None

    @property
    def present(self) -> bool:
        """Whether the block has bytes on the device."""
        return self.host is None or self.back is not None

    def evict(self) -> int:
        """Release the bytes on the device; return how many bytes were copied to the host."""
        copied = 0
        if self.host is None:
            source = _whole(next(s.tensor for s in self.saved if s.tensor is not None).untyped_storage(), self.nbytes)
            self.host = host_bytes(self.nbytes, source.device)
            with torch.no_grad():
                self.host.copy_(source)
            copied = self.nbytes
        self.back = None
        for saved in self.saved:
            saved.leave()
        return copied

    def storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device, copied back from the host if needed."""
        if self.back is None:
            assert self.host is not None
            back = self.fetch(self.nbytes)
            with torch.no_grad():
                _whole(back, self.nbytes).copy_(self.host)
            self.back = back
        return self.back


class SavedTensor:
    """A tensor that a node of autograd saved; with `block` None it is never offloaded."""

    __slots__ = ("__weakref__", "block", "changed", "layout", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, block: SavedBlock | None) -> None:
        self.tensor: torch.Tensor | None = tensor.detach() if block is not None else tensor
        self.version, self.changed = tensor._version, False
        self.layout = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()) if block else None
        self.block = block
        if block is not None:
            block.saved.add(self)

    def leave(self) -> None:
        """Drop the tensor before its bytes are offloaded, and store whether it was changed since it was saved."""
        if self.tensor is not None:
            self.changed = self.tensor._version != self.version
            self.tensor = None

    def unpack(self) -> torch.Tensor:
        """Return the tensor. Raises `StaleActivationsError` if it was changed in place since it was saved."""
        if self.changed or (self.tensor is not None and self.tensor._version != self.version):
            raise StaleActivationsError(
                "a tensor that the backward needs was changed in place after it was saved",
                where='on_mismatch="passive"',
                hint="change it after the backward, or change a copy",
                see="changed-after-forward",
            )
        if self.tensor is not None:
            return self.tensor
        assert self.block is not None
        assert self.layout is not None
        dtype, offset, shape, strides = self.layout
        storage = self.block.storage()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def _whole(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
