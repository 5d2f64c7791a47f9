"""Streams and events of any accelerator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memplan.devices.kinds import is_accelerator


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


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks the host until the work on a device is complete; nothing is queued on the CPU."""
    if not is_accelerator(device):
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Return whether the work that is queued to the current stream is recorded instead of run."""
    is_recording = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(is_recording is not None and is_recording())


def hold_busy(device: torch.device, cycles: int) -> bool:
    """Keep the current stream of a device busy for so many cycles, if it can; return whether it does.

    What is launched meanwhile waits, so that events around it time the device without the launches.
    """
    sleep = getattr(torch.get_device_module(device), "_sleep", None)
    if sleep is None:
        return False
    with torch.accelerator.device_index(device.index):
        sleep(cycles)
    return True
