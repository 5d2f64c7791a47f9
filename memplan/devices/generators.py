"""The random generators that work on a device draws from."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from memplan.devices.kinds import current_index, is_accelerator


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
