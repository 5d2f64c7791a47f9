"""Copies on the CPU, where "device" and "host" are two arenas, in a worker thread for each direction."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import torch

from memplan.runtime.copies.copies import Direction

Action = Callable[[], object]
Before = Callable[[int], object]


class ThreadCopies:
    """Copies in a worker thread for each direction."""

    def __init__(self) -> None:
        self._lanes: dict[Direction, _Lane] = {}  # one for each direction that has copies
        self._timed = False
        self._before: Before | None = None

    def before_each(self, action: Before | None) -> None:
        """Call `action(nbytes)` in the thread before each copy. Tests use it to delay copies or make them fail."""
        self._before = action
        for lane in self._lanes.values():
            lane.before = action

    def copy(self, direction: Direction, host: torch.Tensor) -> ThreadCopy:
        """Return a new planned copy."""
        if direction not in self._lanes:
            lane = self._lanes[direction] = _Lane(f"memplan copies {direction.value}")
            lane.before, lane.timed = self._before, self._timed
        return ThreadCopy(self._lanes[direction], host)

    def time(self, on: bool) -> None:
        """Start or stop timing copies."""
        self._timed = on
        for lane in self._lanes.values():
            lane.timed = on

    def drain(self) -> None:
        """Return when no copy is running."""
        for lane in self._lanes.values():
            lane.drain()

    def settle(self) -> None:
        """Does nothing: a copy is complete when its wait returns."""

    def forget(self, host: torch.Tensor) -> None:
        """Does nothing: a copy alone refers to its memory."""

    def close(self, memory: object = None) -> None:
        """Drain, and end the threads; a later copy starts them again. `memory` is kept until no copy uses it."""
        for lane in self._lanes.values():
            lane.close(memory)


class ThreadCopy:
    """A `Copy` in a worker thread."""

    __slots__ = ("_done", "_error", "_host", "_lane", "nbytes", "seconds", "stalled")

    def __init__(self, lane: _Lane, host: torch.Tensor) -> None:
        self._lane = lane
        self._host = host
        self._done = threading.Lock()  # free from the end of a copy to its wait
        self._error: BaseException | None = None
        self.stalled = self.seconds = 0.0
        self.nbytes = 0

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put the copy in the queue of the thread."""
        assert source.nbytes == destination.nbytes
        self.nbytes = source.nbytes
        self._done.acquire(blocking=False)
        self._error = None
        self._lane.put(self, partial(_move, destination, source, self._lane.before))

    def run(self, move: Action) -> None:
        """Run the copy, in the thread of the lane."""
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
        """Block until the copy is complete; raise the error that it raised."""
        if not self._done.acquire(blocking=False):
            since = perf_counter()
            self._done.acquire()
            self.stalled += perf_counter() - since
        self._lane.pending.discard(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _move(destination: torch.Tensor, source: torch.Tensor, before: Before | None) -> None:
    """Copy the bytes with `memmove`: a torch op in this thread would start a thread pool, and thread-local state."""
    if before is not None:
        before(source.nbytes)
    ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)  # releases the GIL


class _Lane:
    """A queue of copies and the thread that runs them, which starts with the first copy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: SimpleQueue[tuple[ThreadCopy | None, Action]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.before: Before | None = None
        self.timed = False
        self.pending: set[ThreadCopy] = set()  # copies that were started, and neither waited for nor drained
        self._kept: object = None  # the memory of copies that still run after `close`

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

    def close(self, memory: object) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._queue.put((None, _stop))
        if thread is not threading.current_thread():
            thread.join()
        else:  # called by the garbage collector: the copy that runs here, and those in the queue, refer to the lane
            self._kept = memory
        self.pending.clear()


def _stop() -> None:
    """Does nothing: the thread of a lane ends when it takes this from its queue."""


def _serve(queue: SimpleQueue[tuple[ThreadCopy | None, Action]]) -> None:
    """Run the queue of a lane; keep no reference to a copy while waiting for the next."""
    while True:
        copy, action = queue.get()
        if action is _stop:
            return
        if copy is None:
            action()
        else:
            copy.run(action)
        del copy, action
