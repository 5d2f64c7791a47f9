"""Copies between the arena and the host: one op starts a copy, another op waits for it.

Copies in one direction run in the order of their starts, in a thread on the CPU (`copy_threads.py`) and in a stream on
an accelerator. Events order the streams: a copy starts after all work that was launched before it, and work after its
wait runs after it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import current_stream, new_event, new_stream


class Direction(enum.Enum):
    """The direction of a copy."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"
    ACROSS = "to another device"


class Copy(Protocol):
    """One planned copy, which runs once in each step.

    `stalled`: the seconds that all its waits have taken. `nbytes` and `seconds`: the bytes and the time of the last
    run; `seconds` is known only while copies are timed.
    """

    stalled: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """The seconds that the last run took; 0 if it was not timed."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying the bytes of `source` to `destination`; both are contiguous."""

    def wait(self) -> None:
        """Return when the copy is complete, or raise the error that it raised."""


class Copies(Protocol):
    """The copies of one arena."""

    def copy(self, direction: Direction, host: torch.Tensor) -> Copy:
        """Return a new planned copy.

        `host` is the host memory of its bytes, which the copy keeps alive until it is complete.
        """

    def time(self, on: bool) -> None:
        """Start or stop timing copies."""

    def drain(self) -> None:
        """Return when no copy is running; the wait of a copy that has ended returns at once."""

    def settle(self) -> None:
        """Return when every copy that an op has waited for is complete on the host too."""

    def forget(self, host: torch.Tensor) -> None:
        """Release the memory of copies that will not run again; none of them may be running."""

    def close(self, memory: object = None) -> None:
        """Drain, and release the threads, streams or memory that copies use.

        `memory` is kept until no copy uses it: in a thread that runs copies, the garbage collector may call this while
        one is running there.
        """


class StreamCopies:
    """Copies in a stream for each direction and device, to and from pinned memory, and between devices.

    `devices` are those of the arena.
    """

    def __init__(self, *devices: torch.device) -> None:
        self.devices = devices
        self.pending: set[StreamCopy] = set()
        self.timed = False
        self._streams: dict[tuple[Direction, torch.device], torch.Stream] = {}
        self._hosts: dict[int, torch.Tensor] = {}

    def copy(self, direction: Direction, host: torch.Tensor) -> StreamCopy:
        """Return a new planned copy.

        `host` is kept alive until `close`: a copy may still run when the program is deleted, and torch's allocator of
        pinned memory does not know that the copy uses it.
        """
        self._hosts[host.data_ptr()] = host
        return StreamCopy(self, direction)

    def streams(self, direction: Direction, devices: Sequence[torch.device]) -> tuple[torch.Stream, ...]:
        """Return the streams of copies in a direction, one on each of these devices."""
        for device in devices:
            if (direction, device) not in self._streams:
                self._streams[direction, device] = new_stream(device)
        return tuple(self._streams[direction, device] for device in devices)

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

    def forget(self, host: torch.Tensor) -> None:
        """Release the memory of copies that will not run again; none of them may be running."""
        self._hosts.pop(host.data_ptr(), None)

    def close(self, memory: object = None) -> None:
        """Block the host until all copies are complete, and release the host memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self.pending.clear()
        self._hosts.clear()


class StreamCopy:
    """A `Copy` in a stream. Waits block the compute stream, not the host, so `stalled` stays 0."""

    __slots__ = ("_devices", "_direction", "_done", "_owner", "_times", "nbytes", "stalled")

    def __init__(self, owner: StreamCopies, direction: Direction) -> None:
        self._owner = owner
        self._direction = direction
        self._devices: tuple[torch.device, ...] = ()
        self._done: tuple[torch.Event, ...] = ()  # one on each device
        self._times: tuple[torch.Event, ...] = ()
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
        """Start the copy after all work launched so far, which may write `source` or still use `destination`.

        A copy between two devices has a stream on each of them: torch queues it to the current stream of the source
        and makes that of the destination wait, both of which would be streams that compute.
        """
        places = (source.device, destination.device)
        self._devices = tuple(dict.fromkeys(device for device in places if is_accelerator(device)))
        streams = self._owner.streams(self._direction, self._devices)
        for stream in streams:
            for device in self._devices:
                stream.wait_stream(current_stream(device))
        self._owner.pending.add(self)
        self.nbytes = source.nbytes
        first = self._devices[0]
        self._times = tuple(new_event(first, timed=True) for _ in range(2)) if self._owner.timed else ()
        with ExitStack() as stack:
            for stream in reversed(streams):
                stack.enter_context(stream)
            for event in self._times[:1]:
                event.record(streams[0])
            destination.copy_(source, non_blocking=True)
            for event in self._times[1:]:
                event.record(streams[0])
        self._done = self._done or tuple(new_event(device) for device in self._devices)
        for event, stream in zip(self._done, streams, strict=True):
            event.record(stream)

    def wait(self) -> None:
        """Make all work that is launched from now on run after the copy, on every device: one may copy to the host what
        another takes from there."""
        for device in self._owner.devices:
            for event in self._done:
                current_stream(device).wait_event(event)
        self._owner.pending.discard(self)
