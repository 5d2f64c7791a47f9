"""Events: what a step with evictions does, in order. Every policy returns them, and `apply` builds a graph from them.

A policy decides for each storage whether it keeps its bytes, is recomputed, or is offloaded and reloaded. It expresses
its decisions as the sequence of ops and copies that run.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The kind of an event. The index of a RUN is an op, that of every other kind a storage of the workload's graph."""

    RUN = 0
    """Run the op. A second run recomputes those of its results that were dropped."""
    DROP = 1
    """Free the bytes; a later reader needs a recompute, or a reload where the host has the bytes."""
    OFFLOAD = 2
    """Start the copy to the host; the bytes stay allocated."""
    OFFLOADED = 3
    """Wait for that copy, and free the bytes."""
    RELOAD = 4
    """Allocate bytes, at any offset, and start the copy back into them."""
    RELOADED = 5
    """Wait for that copy; from here on the storage can be used."""


class Event(NamedTuple):
    """One event: its kind, and the index of the op (RUN) or storage (all other kinds) that it concerns."""

    kind: Kind
    of: int


Events = tuple[Event, ...]
