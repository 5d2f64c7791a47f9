"""Copies between the arena and the host that run beside the step: started by one op, waited for by another.

On the CPU, where "device" and "host" are two arenas, a worker thread per direction copies. On CUDA, a stream per
direction does, and events order it with the stream that computes: a copy starts after all that was launched before
it, and what follows its wait runs after it. Copies in one direction run in the order of their starts.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

import torch

Action = Callable[[], object]
Before = Callable[[int], object]


class Direction(enum.Enum):
    """Where the bytes go."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"
    ACROSS = "to another device"


class Copy(Protocol):
    """One planned copy, run once in each step. `stalled`: the seconds that all its waits have taken; `nbytes` and
    `seconds` (of the last one): what it copies and how long that took, known of copies that are timed.
    """

    stalled: float
    nbytes: int

    @property
    def seconds(self) -> float:
        """0 where it was not timed."""

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Let the bytes of `source` be copied to those of `destination`; both are contiguous."""

    def wait(self) -> None:
        """Return when they are there, or raise what went wrong."""


class Copies(Protocol):
    """All copies of an arena."""

    def copy(self, direction: Direction, host: torch.Tensor, device: torch.device | None = None) -> Copy:
        """A new planned copy, into or out of `device` (None: the arena's). Until it is done, it keeps `host` alive, the
        memory that holds its bytes there."""

    def time(self, on: bool) -> None:
        """Take the time of every copy from now on, or of none."""

    def drain(self) -> None:
        """Return when no copy is under way; a copy that is waited for later is done."""

    def settle(self) -> None:
        """Return when every copy that an op has waited for is done for the host too."""

    def close(self) -> None:
        """Drain, and give back what copies need."""


def make_copies(device: torch.device) -> Copies:
    """What copies between an arena on `device` and the host. Nothing is started before the first copy is."""
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()


# -- on the CPU ------------------------------------------------------------------------------------------


class ThreadCopies:
    """Copies by a thread per direction."""

    def __init__(self) -> None:
        self._lanes = {direction: _Lane(f"memplan copies {direction.value}") for direction in Direction}

    def before_each(self, action: Before | None) -> None:
        """Call `action(nbytes)` in the thread before each copy: tests make copies slow, or let them fail."""
        for lane in self._lanes.values():
            lane.before = action

    def copy(self, direction: Direction, host: torch.Tensor, device: torch.device | None = None) -> ThreadCopy:
        """A new planned copy."""
        return ThreadCopy(self._lanes[direction], host)

    def time(self, on: bool) -> None:
        """See `Copies`."""
        for lane in self._lanes.values():
            lane.timed = on

    def drain(self) -> None:
        """Return when no copy is under way."""
        for lane in self._lanes.values():
            lane.drain()

    def settle(self) -> None:
        """Nothing is left to do: what a wait says is so."""

    def close(self) -> None:
        """Drain, and end the threads; a later copy starts them again."""
        for lane in self._lanes.values():
            lane.close()


class ThreadCopy:
    """See `Copy`."""

    __slots__ = ("_done", "_error", "_host", "_lane", "nbytes", "seconds", "stalled")

    def __init__(self, lane: _Lane, host: torch.Tensor) -> None:
        self._lane = lane
        self._host = host
        self._done = threading.Lock()  # free from the end of a copy to its wait
        self._error: BaseException | None = None
        self.stalled = self.seconds = 0.0
        self.nbytes = 0

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Hand the copy to the thread."""
        assert source.nbytes == destination.nbytes
        self.nbytes = source.nbytes
        self._done.acquire(blocking=False)
        self._error = None
        self._lane.put(self, partial(_move, destination, source, self._lane.before))

    def run(self, move: Action) -> None:
        """Copy (in the lane's thread)."""
        timed = self._lane.timed
        since = perf_counter() if timed else 0.0
        try:
            move()
        except BaseException as error:  # raised where the step waits
            self._error = error
        if timed:
            self.seconds = perf_counter() - since
        self._done.release()

    def wait(self) -> None:
        """Block until the copy is there."""
        if not self._done.acquire(blocking=False):
            since = perf_counter()
            self._done.acquire()
            self.stalled += perf_counter() - since
        self._lane.pending.discard(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _move(destination: torch.Tensor, source: torch.Tensor, before: Before | None) -> None:
    """No torch op runs in a lane's thread: each would bring its own pool of threads, and state per thread."""
    if before is not None:
        before(source.nbytes)
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)  # lets go of the interpreter's lock


class _Lane:
    """A queue of copies and the thread that runs them, started when it is needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[tuple[ThreadCopy | None, Action]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.before: Before | None = None
        self.timed = False
        self.pending: set[ThreadCopy] = set()  # started, neither waited for nor drained

    def put(self, copy: ThreadCopy, move: Action) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self.name, daemon=True)
            self._thread.start()
        self.pending.add(copy)
        self._queue.put((copy, move))

    def drain(self) -> None:
        if self.pending and self._thread is not None and self._thread.is_alive():
            done = threading.Event()
            self._queue.put((None, done.set))
            done.wait()
        self.pending.clear()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put((None, _leave))
        if thread is not threading.current_thread():  # garbage may be collected there
            thread.join()
        self.pending.clear()


def _leave() -> None:
    """What ends a lane's thread when it comes to it."""


def _serve(queue: SimpleQueue[tuple[ThreadCopy | None, Action]]) -> None:
    """Run what comes, and hold nothing while nothing comes."""
    while True:
        copy, action = queue.get()
        if action is _leave:
            return
        if copy is None:
            action()
        else:
            copy.run(action)
        del copy, action


# -- on CUDA ---------------------------------------------------------------------------------------------


class StreamCopies:
    """Copies by a stream per direction and device, to and from pinned memory, and from device to device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: set[StreamCopy] = set()
        self.timed = False
        self._streams: dict[tuple[Direction, torch.device], torch.cuda.Stream] = {}
        self._hosts: dict[int, torch.Tensor] = {}

    def copy(self, direction: Direction, host: torch.Tensor, device: torch.device | None = None) -> StreamCopy:
        """A new planned copy.

        `host` stays until `close`: a stream may wait for a copy that runs on when the program is gone, and torch's
        allocator of pinned memory, which sees addresses within it only, would give it to somebody else.
        """
        device = device or self.device
        if (direction, device) not in self._streams:
            self._streams[direction, device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hosts[host.data_ptr()] = host
        return StreamCopy(self, self._streams[direction, device])

    def time(self, on: bool) -> None:
        """See `Copies`."""
        self.timed = on

    def drain(self) -> None:
        """Wait, on the host, for copies that no op has waited for."""
        if self.pending:
            for stream in self._streams.values():
                stream.synchronize()
            self.pending.clear()

    def settle(self) -> None:
        """Wait, on the host, for all copies: the caller may read what came, and change what went."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for all copies, those too that streams wait for, and give up the host's memory."""
        for stream in self._streams.values():
            stream.synchronize()
        self.pending.clear()
        self._hosts.clear()


class StreamCopy:
    """See `Copy`. It is the computing stream that waits, not the host: `stalled` stays 0."""

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
        """Waits, on the host, for its end."""
        if not self._times:
            return 0.0
        begun, ended = self._times
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """After the producer of the source, and after the last user of what the destination's bytes held."""
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
        """Whatever is launched from now on runs after the copy."""
        for device in self._devices:
            torch.cuda.current_stream(device).wait_event(self._done)
        self._owner.pending.discard(self)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
