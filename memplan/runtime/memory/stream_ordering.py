"""Orders the steps of one arena on several CUDA streams: each waits for the one before, whose bytes it overwrites.

Eager allocates separate tensors on each stream. All steps share the arena, so the work that a step launches must run
after the work of the last step, on whatever stream that ran.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Order = Callable[[], None]


def make_stream_ordering(*devices: torch.device) -> Order:
    """Return the function to call when a step begins. On the CPU it does nothing: steps run one after another."""
    orderings = [StreamOrdering(device) for device in devices if device.type == "cuda"]
    if len(orderings) < 2:
        return orderings[0] if orderings else _nothing

    def order_all() -> None:
        for order in orderings:
            order()

    return order_all


class StreamOrdering:
    """Makes the current stream of a device wait for the stream of the last step, if that is another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._raw = -1
        self._last: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        """Order the current stream after the last one. During a capture, the capturing code orders the streams."""
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw == self._raw or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._raw, self._last = raw, current


def _nothing() -> None:
    """Does nothing: steps on the CPU run one after another."""
