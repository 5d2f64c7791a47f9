"""Streams and events of any accelerator."""

from __future__ import annotations

from typing import Any

import torch

from memplan.devices.kinds import is_accelerator

_CYCLES_PER_OP, _MOST_CYCLES = 150_000, 400_000_000  # of a GPU's clock, of about 2 GHz: 75 microseconds an op, 0.2 s


def new_stream(device: torch.device) -> torch.Stream:
    """Return a stream of a device, beside its current one."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream to which work on a device is queued now."""
    return torch.accelerator.current_stream(device)


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return an event of a device; with `timed`, it knows the time at which it was reached."""
    return torch.Event(device, enable_timing=timed)


def record(event: torch.Event, device: torch.device) -> None:
    """Record an event in the current stream of a device, which need not be the current device."""
    event.record(current_stream(device))


def hold(device: torch.device, ops: int) -> None:
    """Let the current stream of a GPU wait for as long as the host takes to queue so many ops."""
    module: Any = torch.get_device_module(device)
    if is_accelerator(device) and hasattr(module, "_sleep"):
        with module.device(device):
            module._sleep(min(ops * _CYCLES_PER_OP, _MOST_CYCLES))


def is_capturing(device: torch.device) -> bool:
    """Return whether the work that is queued to the current stream is recorded instead of run."""
    is_recording = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(is_recording is not None and is_recording())
