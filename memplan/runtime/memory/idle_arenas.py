"""Tells compiled models of one thread of each other: an idle arena holds bytes that the step of another model needs."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from memplan.runtime.memory.arena import Memory


class ArenaHolder(Protocol):
    """A compiled model with an arena of its own. Its names are private: those of the model itself are public."""

    @property
    def _arena(self) -> Memory: ...

    @property
    def _idle_bytes(self) -> int:
        """The bytes of its arena, if no call in it waits for its backward, and it can be given up; else 0."""

    def _give_up_arena(self) -> None:
        """Have it allocate what its steps need while they run, from the next call on, if its options allow that."""


class _OfThread(threading.local):
    """The models of one thread, with the number of the last call of each among all calls."""

    def __init__(self) -> None:
        self.last_call: weakref.WeakKeyDictionary[ArenaHolder, int] = weakref.WeakKeyDictionary()
        self.calls = 0


_HERE = _OfThread()


def note_call(holder: ArenaHolder) -> int:
    """Note a call of a model; return its number among the calls of this thread."""
    _HERE.calls += 1
    _HERE.last_call[holder] = _HERE.calls
    return _HERE.calls


def idle_beside(holder: ArenaHolder, since: int) -> int:
    """Return the bytes of idle arenas of other models on the same device, which were called since a call."""
    return sum(other._idle_bytes for other in _others(holder, since))


def give_up_all(holder: ArenaHolder, since: int) -> None:
    """Have a model, and others on the same device that were called since a call, give up their arenas."""
    for one in (holder, *_others(holder, since)):
        one._give_up_arena()


def _others(holder: ArenaHolder, since: int) -> list[ArenaHolder]:
    called = (other for other, number in tuple(_HERE.last_call.items()) if number > since and other is not holder)
    return [other for other in called if other._arena.device == holder._arena.device]
