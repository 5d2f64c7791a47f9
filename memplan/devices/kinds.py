"""Kinds of devices, and what this machine has of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memplan.errors import UnsupportedDevice

HOST = "cpu"
REFUSED = {"mps": "has no streams, and no tensor can be made at an address of its memory"}
_CACHE_LINE, _ALLOCATION = 64, 512  # bytes: of a CPU, and what CUDA's allocator rounds to


def is_accelerator(device: torch.device) -> bool:
    """Return whether work on a device is queued in streams beside the host."""
    return device.type not in (HOST, "meta")


def require_supported(device: torch.device) -> None:
    """Raise `UnsupportedDevice` for a device on which no arena can be."""
    if device.type in REFUSED:
        hint = "move the model and its inputs to the CPU"
        raise UnsupportedDevice(f"{device.type!r} {REFUSED[device.type]}", where="model", hint=hint, see="device")


def is_available(kind: str) -> bool:
    """Return whether this machine has a device of a kind ("cpu", "cuda", "xpu"), so that tensors there hold numbers."""
    if kind == HOST:
        return True
    found = torch.accelerator.current_accelerator(check_available=True)  # one kind of accelerator in a process
    return found is not None and found.type == kind


def device_count(kind: str) -> int:
    """Return the number of devices of a kind on this machine, or that stand in here; 1 for the CPU."""
    try:
        return 1 if kind == HOST else int(torch.get_device_module(kind).device_count())
    except RuntimeError:  # torch knows the name alone
        return 0


def current_index(kind: str) -> int:
    """Return the number of the current device of a kind; 0 if there is none."""
    return torch.accelerator.current_device_index() if kind != HOST and is_available(kind) else 0


def name_of(device: torch.device) -> str:
    """Return the name that its maker gave a device ("NVIDIA H200"); "" if there is none."""
    if not is_accelerator(device) or not is_available(device.type):
        return ""
    get_name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(get_name(device)) if get_name is not None else ""


def alignment_of(device: torch.device) -> int:
    """Return the alignment of buffers on a device, in bytes: a cache line, or what CUDA's own allocator rounds to."""
    return _ALLOCATION if is_accelerator(device) else _CACHE_LINE


def give_back_unused(device: torch.device) -> None:
    """Give the memory of an accelerator back that torch's allocator keeps for later, and nothing uses."""
    empty = getattr(torch.get_device_module(device), "empty_cache", None) if is_accelerator(device) else None
    if empty is not None:
        empty()


def allocations_of(device: torch.device) -> torch.profiler.DeviceType:
    """Return the kind under which torch's profiler records the allocations on a device."""
    kinds = torch.profiler.DeviceType
    return {HOST: kinds.CPU, "cuda": kinds.CUDA, "xpu": kinds.XPU}.get(device.type, kinds.PrivateUse1)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a step on a device draws from: the host's, and that of the device."""
    found = [torch.default_generator]
    if is_accelerator(device):
        own = getattr(torch.get_device_module(device), "default_generators", ())
        index = device.index if device.index is not None else current_index(device.type)
        found += own[index : index + 1]
    return found


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that sets the generators of the host and of a device back when it is left."""
    if not is_accelerator(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
