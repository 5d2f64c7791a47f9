"""A link and a clock for tests: every op takes one second, and copies as long as a test says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from memplan.runtime.copies import Direction


class Clock:
    """Virtual seconds. It is read before and after each op, by turns, and an op takes one second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._within = False

    def __call__(self) -> float:
        """What `perf_counter` is for."""
        if self._within:
            self.now += 1.0
        self._within = not self._within
        return self.now


class VirtualCopies:
    """Copies whose bytes are there at once, and whose time passes on `clock`: `seconds(nbytes)` each, one after the
    other by direction. `said(nbytes)` is what a copy says that it took.
    """

    def __init__(self, clock: Clock, seconds: Callable[[int], float], said: Callable[[int], float]) -> None:
        self.clock, self.duration, self.said = clock, seconds, said
        self.free = dict.fromkeys(Direction, 0.0)

    def copy(self, direction: Direction, host: torch.Tensor, device: torch.device | None = None) -> VirtualCopy:
        """See `Copies`."""
        return VirtualCopy(self, direction)

    def drain(self) -> None:
        """See `Copies`."""

    def settle(self) -> None:
        """See `Copies`."""

    def forget(self, host: torch.Tensor) -> None:
        """See `Copies`."""

    def close(self, memory: object = None) -> None:
        """See `Copies`."""


class VirtualCopy:
    """See `Copy`."""

    def __init__(self, owner: VirtualCopies, direction: Direction) -> None:
        self._owner, self._direction = owner, direction
        self.stalled = self.seconds = self._end = 0.0
        self.nbytes = 0

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """See `Copy`."""
        owner, self.nbytes = self._owner, source.nbytes
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
        begin = max(owner.clock.now, owner.free[self._direction])
        self._end = owner.free[self._direction] = begin + owner.duration(self.nbytes)
        self.seconds = owner.said(self.nbytes)

    def wait(self) -> None:
        """See `Copy`."""
        stall = max(0.0, self._end - self._owner.clock.now)
        self._owner.clock.now += stall
        self.stalled += stall


@contextmanager
def virtual(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], said: Callable[[int], float] | None = None
) -> Iterator[Clock]:
    """What is compiled within is measured in virtual time; `said`: as `seconds` if left out."""
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr("memplan.runtime.profiling.op_timer.perf_counter", clock)
        patch.setattr(
            "memplan.runtime.memory.arena.make_copies", lambda *_: VirtualCopies(clock, seconds, said or seconds)
        )
        yield clock
