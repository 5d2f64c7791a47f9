"""Which graph instances of a thread are ready to run, and in which memory: `Residents`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaOwnership

_STEPS = 4  # training steps for which a program keeps its arena without being called


class Resident(Protocol):
    """A program with an arena. `keeps`: it has a backward. `last_step`: the number of the step of its last call."""

    last_step: int

    @property
    def keeps(self) -> bool: ...

    @property
    def arena(self) -> Arena: ...

    @property
    def ownership(self) -> ArenaOwnership: ...


class Residents:
    """The programs of one thread. A program without a backward has no arena of its own where another's is free."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._step = 0

    def add(self, resident: Resident) -> None:
        """Add a program."""
        self._all.add(resident)

    def enter(self, resident: Resident) -> bool:
        """Note that a program is called; return whether a training step begins with this call."""
        begins = resident.keeps and not any(other.ownership.pending for other in self._all)
        self._step += begins
        resident.last_step = self._step
        return begins

    def stale(self, resident: Resident) -> bool:
        """Return whether a program was not called in the last steps, and nothing waits for its backward."""
        return resident.last_step < self._step - _STEPS and resident.ownership.pending is None

    def free_arena(self, nbytes: int, device: torch.device, *, but: Resident | None = None) -> Arena | None:
        """Return the largest arena of at least `nbytes` bytes in which no activation waits for a backward; None if
        there is none. `but`: a program whose own arena does not count.
        """
        found = [r.arena for r in self._all if r is not but and r.arena.device == device and self.is_free(r.arena)]
        return max((a for a in found if a.nbytes >= nbytes), key=lambda arena: arena.nbytes, default=None)

    def is_free(self, arena: Arena) -> bool:
        """Return whether no activation in the memory of an arena waits for a backward."""
        return not any(other.ownership.pending for other in self.of(arena))

    def of(self, arena: Arena) -> Iterable[Resident]:
        """Return the programs that run in the memory of an arena."""
        return [other for other in self._all if other.arena.memory is arena.memory]
