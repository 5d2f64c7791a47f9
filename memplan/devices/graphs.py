"""Recordings by torch's generic graphs (`torch.accelerator.Graph`, torch 2.12 and newer)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memplan.devices.kinds import is_accelerator, is_available
from memplan.torch_inside.versions import accelerators


def can_record(device: torch.device) -> bool:
    """Return whether torch records graphs on a device."""
    if not is_accelerator(device) or not is_available(device.type) or accelerators("Graph") is None:
        return False
    try:
        new_graph(None)
    except RuntimeError:  # no implementation is registered for this kind
        return False
    return True


def new_graph(pool: tuple[int, int] | None) -> Any:
    """Return an empty graph, whose memory is in a pool of its own or in that of another graph.

    While it captures, only its own thread must not wait for the device.
    """
    return torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")


@contextmanager
def capturing(graph: Any, device: torch.device, stream: torch.Stream) -> Iterator[None]:
    """Record in `graph` what is queued to a stream of `device`, which is the current stream meanwhile."""
    with torch.accelerator.device_index(device.index), stream, graph:
        yield


def replay(graph: Any, device: torch.device) -> None:
    """Queue what a graph recorded to the current stream of its device, which need not be the current device."""
    with torch.accelerator.device_index(device.index):
        graph.replay()


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator keeps of a device."""
    return torch.accelerator.memory_reserved(device)
