"""What an evicting step does, as a list of events: the one language that policies speak and `apply` reads.

A policy decides for each storage whether it keeps its bytes, is computed again or goes to the host and comes
back. Whatever it decides, it says so as the sequence of what runs, in order.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """What happens. The index of a RUN is an op, that of all others a storage (of the workload's graph)."""

    RUN = 0
    """Run the op: its turn, or once more. Again, it renews what was dropped of what it writes."""
    DROP = 1
    """Give up the bytes; who needs the storage later must have it computed again."""
    OFFLOAD = 2
    """Start the copy to the host; the bytes stay taken."""
    OFFLOADED = 3
    """Wait for that copy, and give up the bytes."""
    RELOAD = 4
    """Take bytes, anywhere, and start the copy back into them."""
    RELOADED = 5
    """Wait for that copy; the storage can be used."""


class Event(NamedTuple):
    """One thing that happens."""

    kind: Kind
    of: int


Events = tuple[Event, ...]
