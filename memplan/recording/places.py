"""Finds fallback results that can be allocated at their planned address, and the allocator that puts them there.

PyTorch's caching allocator requests segments from a pool's own allocator: above 10 MiB one for each tensor, rounded up
to 2 MiB (c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc and kRoundLarge). Therefore the bytes after a result, up to
the end of its segment, must be free as well, and no other result of the op may need a segment of the same size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from memplan.core.plan import Plan
from memplan.recording.allocator import Backing

LEAST = 10 << 20  # bytes: smaller tensors share segments
_GRAIN = 2 << 20


def segment(nbytes: int) -> int:
    """Return the bytes of the segment for a tensor of `nbytes` bytes, which must be at least `LEAST`."""
    return -(-nbytes // _GRAIN) * _GRAIN


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """The place of one result of an op, value `value` (an index): `nbytes` bytes at `offset` in the arena."""

    value: int
    offset: int
    nbytes: int


def places(plan: Plan) -> dict[int, PlannedPlace]:
    """Return by op (index) the result that can be allocated at its planned offset although its kernel has no `out=`."""
    graph, found = plan.placed, {}
    for step, index in enumerate(plan.schedule.order):
        op = graph.ops[index]
        if op.direct:
            continue
        read = {graph.values[v].storage for v in op.reads}
        made = [v for v in op.writes if graph.storages[graph.values[v].storage].nbytes >= LEAST]
        sizes = [segment(graph.storages[graph.values[v].storage].nbytes) for v in made]
        for value, size in zip(made, sizes, strict=True):
            storage = graph.storages[graph.values[value].storage]
            mine = graph.values[value].storage not in read
            if mine and sizes.count(size) == 1 and storage.planned and _is_free(plan, step, storage.name, size):
                found[index] = PlannedPlace(value, plan.solution.offsets[storage.name] + plan.redzone, storage.nbytes)
                break
    return found


def _is_free(plan: Plan, step: int, name: str, size: int) -> bool:
    """Return whether only `name` is alive at `step` in the segment of `size` bytes at its planned offset."""
    start = plan.solution.offsets[name] + plan.redzone
    if start + size > plan.arena_size:
        return False
    others = [b for b in plan.problem.alive_at(step) if b.id != name]
    at = plan.solution.offsets
    return all(at[b.id] + b.size <= start or start + size <= at[b.id] for b in others)


class PlaceAllocator:
    """An allocator for pools whose first tensor is placed at a given address in [low, high)."""

    def __init__(self, backing: Backing, exchange: Any, low: int, high: int) -> None:
        import numpy as np

        from memplan.recording import place_kernel

        exchange.argtypes, exchange.restype = (ctypes.c_size_t,), ctypes.c_int
        self._kernel: Any = place_kernel
        self._state: Any = np.zeros(place_kernel.WORDS, np.int64)
        self._state[place_kernel.LOW], self._state[place_kernel.HIGH] = low, high
        self._backing, self._keep, self._rounds = backing, exchange, 0
        self._functions = place_kernel.make_place(self._state.ctypes.data, backing, exchange)

    @property
    def pointers(self) -> tuple[int, int]:
        """Addresses of `void* allocate(size_t, int, void*)` and `void release(void*, size_t, int, void*)`."""
        return self._functions[0].address, self._functions[1].address

    @contextmanager
    def expecting(self, address: int, nbytes: int, *, alone: bool = False) -> Iterator[None]:
        """Within the context, place the first segment for a tensor of `nbytes` bytes at `address`.

        `alone`: nothing else that is allocated within outlives it, so that all such contexts can share the memory.
        """
        k, state = self._kernel, self._state
        self._rounds += 1
        state[k.ADDRESS], state[k.NBYTES], state[k.ROUND] = address, segment(nbytes), self._rounds if alone else 0
        try:
            yield
        finally:
            state[k.ADDRESS] = state[k.ROUND] = 0

    @property
    def scratch(self) -> int:
        """The bytes that such contexts share."""
        return sum(nbytes for _, nbytes in self._blocks())

    def close(self) -> None:
        """Free what contexts share. Nothing may use it any more, and no pool may be left."""
        for address, _ in self._blocks():
            self._backing.release(address)
        self._state[self._kernel.BLOCKS] = 0

    def _blocks(self) -> list[tuple[int, int]]:
        k = self._kernel
        table = self._state[k.TABLE : k.TABLE + 3 * int(self._state[k.BLOCKS])].reshape(-1, 3)
        return [(int(address), int(nbytes)) for address, nbytes, _ in table]
