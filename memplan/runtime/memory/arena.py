"""The arena: one allocation, made once, and the tensors that are nothing but addresses in it.

Every buffer gets a storage of its own that cannot be resized. Views of one big tensor would share a version
counter, would move under `as_strided`'s absolute offsets, and would let a kernel resize into its neighbours.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memplan.core.evictions import DeviceArena
from memplan.core.graph import Value
from memplan.core.plan import Plan
from memplan.planning.consistency import require_budget
from memplan.runtime.copies.copies import Copies
from memplan.runtime.copies.copy_streams import StreamCopies
from memplan.runtime.copies.copy_threads import ThreadCopies
from memplan.runtime.memory.arena_ownership import ArenaOwnership
from memplan.runtime.memory.stream_ordering import make_turns


class Memory:
    """`nbytes` bytes on `device`, never moved; `pinned`: of the host, such that a GPU can copy them by itself.

    Tensors made from it do not keep it alive: whoever holds them holds the memory.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.nbytes = nbytes
        self.device = self.memory.device

    def bytes_at(self, low: int, high: int) -> torch.Tensor:
        """The bytes [low, high) as a tensor."""
        return self.memory[low:high]

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A non-resizable storage of `nbytes` bytes at `offset`."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        pointer = self.memory.data_ptr() + offset
        made: Any = torch._C._construct_storage_from_data_pointer(pointer, self.device, nbytes)
        return made  # type: ignore[no-any-return]


class Arena(Memory):
    """Where a step lives. Programs that share it take turns (`ownership`), and share what copies to the host."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes, device)
        self.copies = make_copies(self.device)
        weakref.finalize(self, self.copies.close)  # before its bytes are given back
        self.ownership = ArenaOwnership(self.copies.drain, make_turns(self.device))
        self._host = Memory(0, torch.device("cpu"))

    def host(self, nbytes: int) -> Memory:
        """The memory on the host beside the arena: that of the programs before, where it is large enough."""
        if nbytes > self._host.nbytes:
            self._host = Memory(nbytes, torch.device("cpu"), pinned=self.device.type == "cuda")
        return self._host

    def turned(self, plan: Plan) -> Arena | None:
        """The arena as a program of `plan` sees it, when it fits."""
        return self if plan.arena_size <= self.nbytes else None


def make_copies(device: torch.device) -> Copies:
    """What copies between an arena on `device` and the host. Nothing is started before the first copy is."""
    return StreamCopies(device) if device.type == "cuda" else ThreadCopies()


class Arenas(Arena):
    """An arena on each of several devices: an offset is one of the plan's `sections`, laid end to end."""

    def __init__(self, sections: Sequence[DeviceArena]) -> None:
        super().__init__(0, torch.device(sections[0].device))
        self._memories = tuple(Memory(section.size, torch.device(section.device)) for section in sections)
        self.ownership.turn = make_turns(*dict.fromkeys(memory.device for memory in self._memories))
        self._sections = tuple(sections)
        self._owner: Arena | None = None  # of a view: what closes the copies when it is gone

    def bytes_at(self, low: int, high: int) -> torch.Tensor:
        memory, start = self._at(low)
        return memory.memory[low - start : high - start]

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        memory, start = self._at(offset)
        return Memory.storage(memory, offset - start, nbytes)

    def turned(self, plan: Plan) -> Arena | None:
        pairs = list(zip(plan.devices, self._memories, strict=False))
        if len(pairs) != len(self._memories) or any(s.size > m.nbytes for s, m in pairs):
            return None
        if plan.devices == self._sections:
            return self
        other = copy.copy(self)  # the same memories, copies and ledger
        other._sections, other._owner = plan.devices, self
        return other

    def _at(self, offset: int) -> tuple[Memory, int]:
        """The memory that holds the byte at `offset`, and the offset of its first."""
        for section, memory in zip(reversed(self._sections), reversed(self._memories), strict=True):
            if section.start <= offset and (section.size or not section.start):
                return memory, section.start
        raise AssertionError(offset)


def arena_for(plan: Plan, device: torch.device, room: int = 0) -> Arena:
    """An arena for `plan`, never larger than its budget: raises `InvalidPlan`. `room`: bytes to have at least, where
    it is on one device."""
    require_budget(plan)
    return Arenas(plan.devices) if plan.devices else Arena(max(plan.arena_size, room), device)


def arena_for_all(plans: Sequence[Plan], device: torch.device, room: int = 0) -> Arena:
    """An arena in which the programs of several plans take turns, on every device as large as the largest wants it."""
    largest = arena_for(max(plans, key=lambda plan: plan.arena_size), device, room)
    if all(largest.turned(plan) for plan in plans):
        return largest
    sections = [max(of, key=lambda section: section.size) for of in zip(*(plan.devices for plan in plans), strict=True)]
    return Arenas(sections)


def view_of(storage: torch.UntypedStorage, value: Value, offset: int | None = None) -> torch.Tensor:
    """The tensor that `value` describes, over `storage`, at `offset` (elements; default: its own)."""
    empty = torch.empty(0, dtype=dtype_of(value), device=storage.device)
    return empty.set_(storage, value.offset if offset is None else offset, value.shape, value.strides)


def view_within(base: Value, value: Value, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of `value`, which is a view of `base`, when `tensor` is the one of `base`."""
    return view_of(tensor.untyped_storage(), value, offset_within(base, value, int(tensor.storage_offset())))


def offset_within(base: Value, value: Value, start: int) -> int:
    """Storage offset (elements of `value`) when `base` starts at `start` (elements of `base`) in its storage.

    Both describe the same bytes as traced; at run time the base may lie elsewhere in a larger storage.
    """
    return value.offset + (start - base.offset) * dtype_of(base).itemsize // dtype_of(value).itemsize


def dtype_of(value: Value) -> torch.dtype:
    """The torch dtype of a value."""
    found = getattr(torch, value.dtype)
    assert isinstance(found, torch.dtype)
    return found
