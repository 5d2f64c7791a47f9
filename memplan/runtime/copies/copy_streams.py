"""Copies on CUDA, in a stream for each direction and device.

Events order the streams: a copy starts after all work that was launched before it, and work after its wait runs after
it.
"""

from __future__ import annotations

import torch

from memplan.runtime.copies.copies import Direction


class StreamCopies:
    """Copies in a stream for each direction and device, to and from pinned memory, and between devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: set[StreamCopy] = set()
        self.timed = False
        self._streams: dict[tuple[Direction, torch.device], torch.cuda.Stream] = {}
        self._hosts: dict[int, torch.Tensor] = {}

    def copy(self, direction: Direction, host: torch.Tensor, device: torch.device | None = None) -> StreamCopy:
        """Return a new planned copy.

        `host` is kept alive until `close`: a copy may still run when the program is deleted, and torch's allocator of
        pinned memory does not know that the copy uses it.
        """
        device = device or self.device
        if (direction, device) not in self._streams:
            self._streams[direction, device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hosts[host.data_ptr()] = host
        return StreamCopy(self, self._streams[direction, device])

    def time(self, on: bool) -> None:
        """Start or stop timing copies."""
        self.timed = on

    def drain(self) -> None:
        """Block the host until all copies that no op has waited for are complete."""
        if self.pending:
            for stream in self._streams.values():
                stream.synchronize()
            self.pending.clear()

    def settle(self) -> None:
        """Block the host until all copies are complete: the caller may read their results and change their sources."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Block the host until all copies are complete, and release the host memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self.pending.clear()
        self._hosts.clear()


class StreamCopy:
    """A `Copy` in a stream. Waits block the compute stream, not the host, so `stalled` stays 0."""

    __slots__ = ("_devices", "_done", "_owner", "_stream", "_times", "nbytes", "stalled")

    def __init__(self, owner: StreamCopies, stream: torch.cuda.Stream) -> None:
        self._owner = owner
        self._stream = stream
        self._devices: tuple[torch.device, ...] = ()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._times: tuple[torch.cuda.Event, ...] = ()
        self.stalled = 0.0
        self.nbytes = 0

    @property
    def seconds(self) -> float:
        """The seconds that the last run took, after blocking the host until it ends; 0 if it was not timed."""
        if not self._times:
            return 0.0
        begun, ended = self._times
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start the copy after all work launched so far, which may write `source` or still use `destination`."""
        self._devices = tuple({t.device for t in (destination, source) if t.is_cuda})
        for device in self._devices:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._owner.pending.add(self)
        self.nbytes = source.nbytes
        self._times = tuple(_timing_event() for _ in range(2)) if self._owner.timed else ()
        with torch.cuda.stream(self._stream):
            for event in self._times[:1]:
                event.record(self._stream)
            destination.copy_(source, non_blocking=True)
            for event in self._times[1:]:
                event.record(self._stream)
        self._done.record(self._stream)

    def wait(self) -> None:
        """Make all work that is launched from now on run after the copy."""
        for device in self._devices:
            torch.cuda.current_stream(device).wait_event(self._done)
        self._owner.pending.discard(self)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
