"""Simulated device memory: a number of bytes, or addresses that can be fragmented."""

from __future__ import annotations

from bisect import insort
from typing import Protocol


class SimulatedMemory(Protocol):
    """An allocator. Keys are any integers; a key holds one block at a time."""

    def take(self, key: int, size: int) -> bool:
        """Allocate `size` bytes (at least 1) for `key`; return False, and change nothing, if they do not fit."""
        ...

    def give(self, key: int) -> None:
        """Free the block of `key`."""
        ...

    def hand_over(self, key: int, to: int) -> None:
        """Give the block of `key` to `to`."""
        ...


class ByteCounter:
    """`capacity` bytes without addresses: an allocation fits if the sum does, as most papers count memory."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._held: dict[int, int] = {}

    def take(self, key: int, size: int) -> bool:
        if size > self.free:
            return False
        self.free -= size
        self._held[key] = size
        return True

    def give(self, key: int) -> None:
        self.free += self._held.pop(key)

    def hand_over(self, key: int, to: int) -> None:
        self._held[to] = self._held.pop(key)


class AddressSpace:
    """`capacity` bytes from address 0, each block at the lowest address where it fits (first-fit)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: list[tuple[int, int, int]] = []  # (offset, end, key), ascending

    @property
    def offsets(self) -> dict[int, int]:
        """The offset of each key's block."""
        return {key: offset for offset, _, key in self._blocks}

    def take(self, key: int, size: int) -> bool:
        offset = 0
        for start, end, _ in self._blocks:
            if start - offset >= size:
                break
            offset = end
        if offset + size > self.capacity:
            return False
        insort(self._blocks, (offset, offset + size, key))
        return True

    def give(self, key: int) -> None:
        self._blocks = [block for block in self._blocks if block[2] != key]

    def hand_over(self, key: int, to: int) -> None:
        self._blocks = [(a, b, to if k == key else k) for a, b, k in self._blocks]
