"""Copies that run as late as their waits allow, in this thread: a missing wait shows in every run, not in unlucky ones.

A destination is poisoned when its copy starts. The source is read when the copy runs, so whatever changed it in between
shows too. A copy runs at its wait, after those that were started before it in its direction, as a stream would.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Collection

import torch

from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.plan import Plan
from memplan.runtime.copies import Direction

POISON = 0xFF  # every float of such bytes is NaN


def positions_of_copies(plan: Plan) -> list[tuple[int, int]]:
    """Return the positions in the schedule of each copy's start and of its wait, in the order of starts."""
    flying: dict[tuple[int, int], int] = {}
    found: dict[int, int] = {}
    for position, index in enumerate(plan.schedule.order):
        op = plan.graph.ops[index]
        if op.target not in TRANSFERS:
            continue
        starts = op.target in (OFFLOAD, RELOAD, SEND)
        source, destination = (op.reads[0], op.writes[0]) if starts else op.reads
        pair = plan.graph.values[source].storage, plan.graph.values[destination].storage
        if starts:
            flying[pair] = position
        else:
            found[flying[pair]] = position
    return sorted(found.items())


class LateCopies:
    """Copies in the calling thread: each runs at its wait, or, with a seed, some run at their start.

    `without`: numbers (in the order in which the copies were planned) of those whose waits do nothing.
    """

    def __init__(self, *, seed: int | None = None, without: Collection[int] = ()) -> None:
        self.without = without
        self.planned = 0
        self.queues: dict[Direction, list[LateCopy]] = {direction: [] for direction in Direction}
        self._chance = random.Random(seed) if seed is not None else None

    def copy(self, direction: Direction, host: torch.Tensor) -> LateCopy:
        """Return a new planned copy."""
        self.planned += 1
        return LateCopy(self, self.queues[direction], self.planned - 1, host)

    def runs_early(self) -> bool:
        """Return whether the copy that has just started runs at once."""
        return self._chance is not None and self._chance.random() < 0.5

    def drain(self) -> None:
        """Run what has not run."""
        for queue in self.queues.values():
            while queue:
                queue[0].run()

    def settle(self) -> None:
        """Does nothing: a copy is complete when its wait returns."""

    def forget(self, host: torch.Tensor) -> None:
        """Does nothing: a copy alone refers to its memory."""

    def close(self, memory: object = None) -> None:
        """Forget what has not run: its memory may be gone."""
        for queue in self.queues.values():
            queue.clear()


class LateCopy:
    """A planned copy of `LateCopies`."""

    def __init__(self, owner: LateCopies, queue: list[LateCopy], number: int, host: torch.Tensor) -> None:
        self._owner, self._queue, self._number, self._host = owner, queue, number, host
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stalled = self.seconds = 0.0
        self.nbytes = 0

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Poison the destination, and put the copy in the queue of its direction."""
        assert source.nbytes == destination.nbytes
        if self._tensors is not None:
            self.run_those_before()  # of the step before, whose wait was left out
        self.nbytes = source.nbytes
        ctypes.memset(destination.data_ptr(), POISON, destination.nbytes)
        self._tensors = destination, source
        self._queue.append(self)
        if self._owner.runs_early():
            self.run_those_before()

    def run_those_before(self) -> None:
        """Run the copies that were started before this one in its direction, and this one."""
        while self._tensors is not None:
            self._queue[0].run()

    def run(self) -> None:
        """Copy the bytes as they are now."""
        assert self._tensors is not None
        destination, source = self._tensors
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.nbytes)
        self._tensors = None
        self._queue.remove(self)

    def wait(self) -> None:
        """Run the copy, unless this wait is left out."""
        if self._number not in self._owner.without:
            self.run_those_before()
