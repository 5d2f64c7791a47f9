"""Page-locked memory of the host, for copies to and from an accelerator that run beside its kernels.

torch's own allocator rounds each request up to a power of two. Large requests are whole pages of their own instead,
which CUDA locks where they are.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memplan.devices.kinds import is_accelerator
from memplan.torch_inside.versions import accelerators

LARGE = 1 << 16  # bytes; smaller requests are torch's, which locks many of them at once
_STILL_LOCKED: list[mmap.mmap] = []
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device


def host_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return `nbytes` bytes on the host for copies to and from `device`, page-locked if that is an accelerator.

    Where torch can lock memory at a given address, large requests take whole pages; others are as torch rounds them.
    """
    pinned = is_accelerator(device)
    cudart = getattr(torch.get_device_module(device), "cudart", None) if pinned and nbytes >= LARGE else None
    locked = None if cudart is None else _locked_pages(nbytes, device, cudart())
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) if locked is None else locked


def _locked_pages(nbytes: int, device: torch.device, cudart: Any) -> torch.Tensor | None:
    """Return bytes in pages that are locked as long as a tensor refers to them; None where CUDA does not lock them.

    The pages are shared with forked processes: a copy on write would move them away from under the device.
    """
    pages = mmap.mmap(-1, nbytes)
    held = np.frombuffer(pages, np.uint8)
    made = torch.from_numpy(held)  # keeps `held`
    with torch.get_device_module(device).device(device):  # another one would be given a context
        failed = int(cudart.cudaHostRegister(made.data_ptr(), nbytes, _PORTABLE))
    if failed:
        with suppress(RuntimeError):  # the next launch raises CUDA's last error, which is reset by that
            torch.zeros(1, device=device)
        return None
    weakref.finalize(held, _unlock, made.data_ptr(), pages, device, cudart).atexit = False
    return made


def _unlock(address: int, pages: mmap.mmap, device: torch.device, cudart: Any) -> None:
    """Unlock pages that nothing refers to but, maybe, copies of a step that an error has ended.

    Pages that stay locked stay mapped: CUDA would take others at their addresses for them.
    """
    try:
        torch.accelerator.synchronize(device)
        failed = int(cudart.cudaHostUnregister(address))
    except RuntimeError:
        failed = 1
    if failed:
        _STILL_LOCKED.append(pages)


def unlock_unused(device: torch.device) -> None:
    """Give back pinned memory that nothing refers to: torch keeps it for later requests of the same size."""
    give_back = accelerators("empty_host_cache")
    if is_accelerator(device) and give_back is not None:
        give_back()


class HostResults:
    """Makes tensors on the host to which a device copies results. Freed bytes serve later results of the same size.

    It keeps them, so that it must live until the copies of a step that an error has ended are complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = defaultdict[int, list[torch.Tensor]](list)

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of that layout."""
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        nbytes = (last + 1) * dtype.itemsize if all(shape) else 0
        if nbytes < LARGE:
            return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=is_accelerator(self._device))
        if not self._free[nbytes]:
            self._free.clear()  # of other sizes: shapes vary
        free = self._free[nbytes]
        block = free.pop() if free else host_bytes(nbytes, self._device)
        lent = block.numpy()
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.empty(0, dtype=dtype).set_(torch.from_numpy(lent).untyped_storage(), 0, shape, strides)


def in_files(tensors: Iterable[torch.Tensor]) -> dict[int, bool]:
    """Return the addresses of those storages that are mapped from files, or shared with other processes (True).

    What is not shared is read when it is first used, and takes memory of this process once it is written. Empty where
    the system does not say.
    """
    addresses = sorted({t.untyped_storage().data_ptr() for t in tensors})
    found: dict[int, bool] = {}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, flags, _, _, inode, *_ = line.split(maxsplit=5)
            first, last = (bisect_left(addresses, int(end, 16)) for end in place.split("-"))
            if inode != "0":
                found.update(dict.fromkeys(addresses[first:last], flags.endswith("s")))
    return found


def pin(tensors: Iterable[torch.Tensor], device: torch.device, stay: Container[int]) -> None:
    """Move the bytes of tensors to pinned memory, in place, but for storages at addresses that `stay`; tensors that
    share memory still do."""
    moved: dict[int, torch.UntypedStorage] = {}
    for t in tensors:
        storage = t.untyped_storage()
        key = storage.data_ptr()
        if not storage.nbytes() or key in stay or storage.is_pinned():
            continue
        if key not in moved:
            moved[key] = host_bytes(storage.nbytes(), device).untyped_storage()
            moved[key].copy_(storage)
        t.data = torch.empty(0, dtype=t.dtype).set_(moved[key], t.storage_offset(), t.shape, t.stride())
