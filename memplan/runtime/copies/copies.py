"""Copies between the arena and the host that run beside the step: started by one op, waited for by another.

Copies in one direction run in the order of their starts: in a thread on the CPU (`copy_threads.py`), in a stream on
CUDA (`copy_streams.py`).
"""

from __future__ import annotations

import enum
from typing import Protocol

import torch


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
