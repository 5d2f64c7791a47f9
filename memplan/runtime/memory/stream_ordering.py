"""Orders the steps of one arena on several streams: each waits for the one before, whose bytes it overwrites.

Eager allocates separate tensors on each stream. All steps share the arena, so the work that a step launches must run
after the work of the last step, on whatever stream that ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch

from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import current_stream, is_capturing

Order = Callable[[], None]
Use = Callable[[torch.Stream], None]


def make_stream_ordering(*devices: torch.device, used_by: Use | None = None) -> Order:
    """Return the function to call when a step begins. On the CPU it does nothing: steps run one after another.

    `used_by` is called with each stream that a step is the first to run on since another one.
    """
    orderings = [StreamOrdering(device, used_by or _ignore) for device in devices if is_accelerator(device)]
    if len(orderings) < 2:
        return orderings[0] if orderings else _nothing

    def order_all() -> None:
        for order in orderings:
            order()

    return order_all


class StreamOrdering:
    """Makes the current stream of a device wait for the stream of the last step, if that is another one."""

    def __init__(self, device: torch.device, used_by: Use) -> None:
        self._device = device
        self._used_by = used_by
        self._last: torch.Stream | None = None

    def __call__(self) -> None:
        """Order the current stream after the last one. During a capture, the capturing code orders the streams."""
        current = current_stream(self._device)
        if current == self._last or is_capturing(self._device):
            return
        if self._last is not None:
            current.wait_stream(self._last)
        self._last = current
        self._used_by(current)


class StreamUses:
    """Keeps bytes, once they are freed, until what streams had launched by then is complete.

    torch's allocator gives freed bytes away at once on the stream on which they were allocated, and knows of no other.
    `allocations` are lists of tensors, which may still grow.
    """

    def __init__(self, *allocations: Sequence[torch.Tensor]) -> None:
        self._allocations = allocations
        self._beside: list[weakref.ref[torch.Tensor]] = []
        self._last: dict[torch.device, torch.Stream] = {}

    def by(self, stream: torch.Stream) -> None:
        """Note that a stream uses all bytes from now on."""
        self._last[stream.device] = stream
        self._beside = [ref for ref in self._beside if ref() is not None]
        beside = (ref() for ref in self._beside)
        self._note(stream, chain(*self._allocations, (t for t in beside if t is not None)))

    def of(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the steps also use these tensors, as long as somebody else keeps them."""
        made = [t for t in tensors if is_accelerator(t.device)]
        self._beside += map(weakref.ref, made)
        for stream in self._last.values():
            self._note(stream, made)

    def again(self) -> None:
        """Note that the streams of before use allocations that were made again."""
        for stream in self._last.values():
            self._note(stream, chain(*self._allocations))

    @staticmethod
    def _note(stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
        for made in tensors:
            if made.device == stream.device:
                made.record_stream(stream)


def _nothing() -> None:
    """Does nothing: steps on the CPU run one after another."""


def _ignore(stream: torch.Stream) -> None:
    """Does nothing: nobody counts the streams that use the memory."""
