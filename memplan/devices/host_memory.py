"""Page-locked ("pinned") host memory, which devices copy from and to while the host goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memplan.devices.kinds import is_accelerator
from memplan.torch_inside.versions import accelerators


def host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return `nbytes` bytes on the host for copies to and from `device`, pinned if that is an accelerator."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_accelerator(device))


def unlock_unused(device: torch.device) -> None:
    """Give back pinned memory that nothing refers to: torch keeps it for later requests of the same size."""
    give_back = accelerators("empty_host_cache")
    if is_accelerator(device) and give_back is not None:
        give_back()


def pin(tensors: Iterable[torch.Tensor]) -> None:
    """Move the bytes of tensors to pinned memory, in place; tensors that share memory still do."""
    moved: dict[int, torch.UntypedStorage] = {}
    for t in tensors:
        storage = t.untyped_storage()
        if not storage.nbytes() or storage.is_pinned():
            continue
        key = storage.data_ptr()
        if key not in moved:
            moved[key] = storage.pin_memory()
        t.data = torch.empty(0, dtype=t.dtype).set_(moved[key], t.storage_offset(), t.shape, t.stride())
