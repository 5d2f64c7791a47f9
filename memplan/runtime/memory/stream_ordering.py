"""Steps of one arena on several CUDA streams: each waits for the one before it, whose bytes it overwrites.

Eager's tensors are their own on each stream. An arena is one for all, so what a step launches must run after what the
last step launched, on whatever stream that was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Turn = Callable[[], None]


def make_turns(*devices: torch.device) -> Turn:
    """What to call when a step begins. On the CPU there is nothing to wait for."""
    turns = [StreamOrdering(device) for device in devices if device.type == "cuda"]
    if len(turns) < 2:
        return turns[0] if turns else _nothing

    def all_turns() -> None:
        for turn in turns:
            turn()

    return all_turns


class StreamOrdering:
    """Lets the current stream of a device wait for the one that had the last turn, when it is another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._raw = -1
        self._last: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        """Take the next turn. While somebody captures the step, what was before is theirs to wait for."""
        raw: int = torch._C._cuda_getCurrentRawStream(self._device.index)
        if raw == self._raw or torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._raw, self._last = raw, current


def _nothing() -> None:
    """Steps on the CPU run one after another."""
