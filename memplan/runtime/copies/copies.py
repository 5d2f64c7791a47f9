"""The protocols of copies between the arena and the host: one op starts a copy, another op waits for it.

Copies in one direction run in the order of their starts, in a thread on the CPU and in a stream on an accelerator.
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch


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
