"""Copies between the arena and the host: one op starts a copy, another op waits for it.

Copies in one direction run in the order of their starts, in a thread on the CPU and in a stream on an accelerator.
Events order the streams: a copy starts after all work that was launched before it, and work after its wait runs after
it.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from time import perf_counter

import torch

from memplan.devices.kinds import is_accelerator
from memplan.devices.streams import current_stream, new_event, new_stream
from memplan.runtime.host_lane import HostLane


class Direction(enum.Enum):
    """The direction of a copy."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"
    ACROSS = "to another device"


class StreamCopies:
    """Copies in a stream for each direction and device, to and from pinned memory, and between devices.

    `devices` are those of the arena.
    """

    def __init__(self, *devices: torch.device) -> None:
        self.devices = devices
        self.host = HostLane(devices)
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

    def drain(self) -> None:
        """Block the host until all copies that no op has waited for are complete, and the host's ops of a step that has
        failed."""
        self.host.drain()
        if self.pending:
            for stream in self._streams.values():
                stream.synchronize()
            self.pending.clear()

    def settle(self) -> None:
        """Block until all copies and the host's ops are complete: the caller may read results and change sources."""
        for stream in self._streams.values():
            stream.synchronize()
        self.host.settle()

    def forget(self, host: torch.Tensor) -> None:
        """Release the memory of copies that will not run again; none of them may be running."""
        self._hosts.pop(host.data_ptr(), None)

    def close(self, memory: object = None) -> None:
        """Block the host until all copies are complete, and release the host memory."""
        self.host.close()
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


_LANE = "memplan copies"  # how the names of threads begin that run copies


class ThreadCopies:
    """Copies on the CPU, where "device" and "host" are two arenas, in a thread for each direction.

    `pending`: those that were started, and neither waited for nor drained. `before`: called in the thread with the
    bytes of each copy, before it; tests delay copies so, or make them fail.
    """

    def __init__(self) -> None:
        self.host = HostLane(())
        self.pending: set[ThreadCopy] = set()
        self.timed = False
        self.before: Callable[[int], object] | None = None
        self._lanes: dict[Direction, ThreadPoolExecutor] = {}  # of directions that have had copies

    def copy(self, direction: Direction, host: torch.Tensor) -> ThreadCopy:
        """Return a new planned copy."""
        return ThreadCopy(self, direction, host)

    def lane(self, direction: Direction) -> ThreadPoolExecutor:
        """Return what runs the copies of a direction one after another."""
        if direction not in self._lanes:
            self._lanes[direction] = ThreadPoolExecutor(1, f"{_LANE} {direction.value}")
        return self._lanes[direction]

    def drain(self) -> None:
        """Return when no copy is running, and no op of the host."""
        self.host.drain()
        for copy in tuple(self.pending):
            copy.end()
        self.pending.clear()

    def settle(self) -> None:
        """Block until the host's ops have run. A copy is complete when its wait returns."""
        self.host.settle()

    def forget(self, host: torch.Tensor) -> None:
        """Does nothing: a copy alone refers to its memory."""

    def close(self, memory: object = None) -> None:
        """Drain, and end the threads; a later copy starts others. `memory` is kept until no copy uses it."""
        self.host.close()
        inside = threading.current_thread().name.startswith(_LANE)  # the garbage collector ran there
        for lane in self._lanes.values():
            if inside:
                lane.submit(_keep, memory)
            lane.shutdown(wait=not inside)
        self._lanes.clear()
        self.pending.clear()


class ThreadCopy:
    """A `Copy` in a thread."""

    __slots__ = ("_direction", "_host", "_owner", "_running", "nbytes", "seconds", "stalled")

    def __init__(self, owner: ThreadCopies, direction: Direction, host: torch.Tensor) -> None:
        self._owner, self._direction, self._host = owner, direction, host
        self._running: Future[None] | None = None
        self.stalled = self.seconds = 0.0
        self.nbytes = 0

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put the copy in the queue of the thread."""
        assert source.nbytes == destination.nbytes
        self.nbytes = source.nbytes
        self._owner.pending.add(self)
        self._running = self._owner.lane(self._direction).submit(
            self._run, self._owner.before, destination, source, timed=self._owner.timed
        )

    def _run(
        self,
        before: Callable[[int], object] | None,
        destination: torch.Tensor,
        source: torch.Tensor,
        *,
        timed: bool,
    ) -> None:
        """Copy the bytes with `memmove`: a torch op in this thread would start a pool of threads."""
        since = perf_counter() if timed else 0.0
        if before is not None:
            before(source.nbytes)
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)  # releases the GIL
        if timed:
            self.seconds = perf_counter() - since

    def end(self) -> None:
        """Return when the copy is complete, or has failed."""
        if self._running is not None:
            wait([self._running])

    def wait(self) -> None:
        """Block until the copy is complete; raise the error that it raised."""
        self._owner.pending.discard(self)
        running, self._running = self._running, None
        if running is None:
            return
        if not running.done():
            since = perf_counter()
            wait([running])
            self.stalled += perf_counter() - since
        running.result()


def _keep(memory: object) -> None:
    """Does nothing: the queue has kept the memory until now."""


Copies = StreamCopies | ThreadCopies  # of one arena
Copy = StreamCopy | ThreadCopy  # a planned copy, which runs once in each step; `stalled`: seconds of all its waits


def make_copies(*devices: torch.device) -> Copies:
    """Return the copies between an arena on `devices` and the host. A thread or stream starts with the first copy."""
    return StreamCopies(*devices) if is_accelerator(devices[0]) else ThreadCopies()
