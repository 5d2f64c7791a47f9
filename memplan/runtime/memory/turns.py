"""Lets compiled models of one thread share memory: an idle arena holds bytes that the step of another model needs.

A model has an arena of its own at first. When the arenas that are idle while another model is updated would take its
step above eager's peak, all models of the thread move to one coordinator, which places calls that are in flight
together in one arena, and frees it while none is.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from memplan.runtime.memory.shared_arena import ArenaCoordinator


class TurnTaker(Protocol):
    """A compiled model with an arena of its own."""

    @property
    def device(self) -> torch.device:
        """The device of its arena."""

    @property
    def idle_bytes(self) -> int:
        """The bytes of its arena, if no call in it waits for its backward and it stays allocated; else 0."""

    def take_turns(self) -> None:
        """Have it use the coordinator of its thread from the next call on, if its options allow that."""


class _OfThread(threading.local):
    """What belongs to one thread: its models, and the coordinator of each device for those that take turns."""

    def __init__(self) -> None:
        self.takers: weakref.WeakSet[TurnTaker] = weakref.WeakSet()
        self.coordinators: dict[torch.device, ArenaCoordinator] = {}


_HERE = _OfThread()


def join(taker: TurnTaker) -> None:
    """Make a model known to the others of this thread."""
    _HERE.takers.add(taker)


def idle_beside(taker: TurnTaker) -> int:
    """Return the bytes of idle arenas of other models, of this thread and on the same device."""
    return sum(other.idle_bytes for other in _others(taker))


def take_turns(taker: TurnTaker) -> None:
    """Have a model, and the others of this thread on the same device, take turns from their next calls on."""
    for one in (taker, *_others(taker)):
        one.take_turns()


def coordinator_for_turns(device: torch.device) -> ArenaCoordinator:
    """Return the coordinator that models of this thread on a device use when they take turns."""
    if device not in _HERE.coordinators:
        _HERE.coordinators[device] = made = ArenaCoordinator()
        made.free_when_idle()
    return _HERE.coordinators[device]


def _others(taker: TurnTaker) -> list[TurnTaker]:
    return [other for other in tuple(_HERE.takers) if other is not taker and other.device == taker.device]
