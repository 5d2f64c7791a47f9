"""The arena: one block of memory, allocated once, and the tensors at addresses in it.

Every buffer gets a storage of its own that cannot be resized. Views of one large tensor would share a version counter,
would move under the absolute offsets of `as_strided`, and would let a kernel resize into neighbouring buffers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from memplan.core.evictions import DeviceArena
from memplan.core.graph import Value
from memplan.core.plan import Plan
from memplan.devices.kinds import is_accelerator, require_supported
from memplan.distributed.ops import StartedCollectives
from memplan.planning.planfile import require_budget
from memplan.runtime.copies.copies import Copies, StreamCopies
from memplan.runtime.copies.copy_threads import ThreadCopies
from memplan.runtime.memory.arena_ownership import ArenaOwnership
from memplan.runtime.memory.stream_ordering import StreamUses, make_stream_ordering


class Memory:
    """A block of `nbytes` bytes on `device`; `pinned`: page-locked host memory for an accelerator.

    It is allocated when it is first used. Tensors made from it do not keep it alive: their owner must also keep a
    reference to the memory. While it is given back it has no bytes; it may be somewhere else once it is taken again.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.nbytes = nbytes
        self.device = torch.empty(0, device=device).device  # with an index
        self._pinned = pinned
        self.allocated: list[
            torch.Tensor
        ] = []  # the same list in copies, which are the same memory; one tensor or none

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes."""
        if not self.allocated:
            made = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device, pin_memory=self._pinned)
            self.allocated.append(made)
            self._taken_again()
        return self.allocated[0]

    @property
    def held(self) -> int:
        """The bytes that are allocated for it now."""
        return sum(made.untyped_storage().nbytes() for made in self.allocated)

    @property
    def address(self) -> int:
        """The address of its bytes, which are allocated again if they were given back."""
        self.take()
        return self.memory.data_ptr()

    def take(self) -> None:
        """Allocate its bytes again, if they were given back."""
        if self.nbytes and not self.memory.data_ptr():
            self.memory.untyped_storage().resize_(self.nbytes)
            self._taken_again()

    def _taken_again(self) -> None:
        """Note that its bytes were allocated again."""

    def give_back(self) -> None:
        """Free its bytes until it is used again: until then, nobody may use tensors that were made from it."""
        for made in self.allocated:
            made.untyped_storage().resize_(0)

    def leave_bytes(self) -> None:
        """Leave the bytes to what refers to them; others take their place when it is used again."""
        self.allocated.clear()

    def bytes_at(self, low: int, high: int) -> torch.Tensor:
        """Return the bytes [low, high) as a tensor."""
        return self.memory[low:high]

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a non-resizable storage of `nbytes` bytes at `offset`."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        pointer = self.address + offset
        made: Any = torch._C._construct_storage_from_data_pointer(pointer, self.device, nbytes)
        return made  # type: ignore[no-any-return]


class Arena(Memory):
    """The memory of a step. Programs that share it run one at a time (`ownership`) and share its copies to the host.

    `collectives`: those that a step has started on it and not waited for. `uses`: of its bytes by streams, and of what
    programs keep beside it.
    `others`: further devices on which the same steps run. `stays`: it is never given back while it is idle. `thread`:
    the one that began the last step in it.
    """

    stays = False
    thread = 0

    def __init__(self, nbytes: int, device: torch.device, *others: torch.device) -> None:
        super().__init__(nbytes, device)
        self.copies, self.collectives = make_copies(self.device, *others), StartedCollectives()
        self._closing = weakref.finalize(self, self.copies.close, self.allocated)  # before its bytes are freed
        self.uses = StreamUses(self.allocated)
        drain = partial(_drain, self.copies, self.collectives)
        self.ownership = ArenaOwnership(drain, make_stream_ordering(self.device, used_by=self.uses.by))
        self._host = Memory(0, torch.device("cpu"))

    def host(self, nbytes: int) -> Memory:
        """Return at least `nbytes` of host memory for offloaded bytes; earlier memory is reused if large enough."""
        if nbytes > self._host.nbytes:
            self._host = Memory(nbytes, torch.device("cpu"), pinned=is_accelerator(self.device))
        return self._host

    @property
    def sections(self) -> tuple[DeviceArena, ...]:
        """Its parts on several devices; empty on one device."""
        return ()

    def _taken_again(self) -> None:
        self.uses.again()

    def release(self) -> None:
        """Free its memory, although programs that nobody will run again may still refer to it.

        Copies of a forward whose backward will not run are waited for.
        """
        self.ownership.released = True
        self.ownership.drain()
        self.give_back()
        self.nbytes = 0

    def view_for(self, plan: Plan) -> Arena | None:
        """Return the arena as a program of `plan` uses it; None if the plan does not fit."""
        return self if plan.arena_size <= self.nbytes else None


def _drain(copies: Copies, collectives: StartedCollectives) -> None:
    """Return when no copy, and no collective, uses the memory of a step that has ended."""
    copies.drain()
    collectives.drain()


class NewArenas:
    """The arenas that are allocated while a program is built; they are freed if that fails.

    What was built may be kept alive by the error's traceback, with its arena.
    """

    def __init__(self) -> None:
        self._made: list[Arena] | None = None

    def __enter__(self) -> NewArenas:
        self._made = []
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.release()
        self._made = None

    def release(self) -> None:
        """Free those that were allocated so far."""
        for arena in self._made or ():
            if not arena.ownership.released:
                arena.release()

    def keep(self, arena: Arena) -> Arena:
        """Return an arena; it is noted while a program is built."""
        if self._made is not None:
            self._made.append(arena)
        return arena


def make_copies(*devices: torch.device) -> Copies:
    """Return the copies between an arena on `devices` and the host. A thread or stream starts with the first copy."""
    return StreamCopies(*devices) if is_accelerator(devices[0]) else ThreadCopies()


class Arenas(Arena):
    """An arena on each of several devices. Offsets count through the device arenas of the plan, laid end to end."""

    def __init__(self, sections: Sequence[DeviceArena]) -> None:
        super().__init__(0, *(torch.device(section.device) for section in sections))
        self._memories = tuple(Memory(section.size, torch.device(section.device)) for section in sections)
        allocated = [memory.allocated for memory in self._memories]
        self.uses = StreamUses(*allocated)
        self._closing.detach()
        self._closing = weakref.finalize(self, self.copies.close, allocated)
        devices = dict.fromkeys(memory.device for memory in self._memories)
        self.ownership.order_streams = make_stream_ordering(*devices, used_by=self.uses.by)
        self._sections = tuple(sections)
        self._owner: Arena | None = (
            None  # of a view: the arena that it was made from, which closes the copies when freed
        )

    @property
    def sections(self) -> tuple[DeviceArena, ...]:
        return self._sections

    def release(self) -> None:
        super().release()
        for memory in self._memories:
            memory.memory.untyped_storage().resize_(0)

    def bytes_at(self, low: int, high: int) -> torch.Tensor:
        memory, start = self._at(low)
        return memory.memory[low - start : high - start]

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        memory, start = self._at(offset)
        return Memory.storage(memory, offset - start, nbytes)

    def view_for(self, plan: Plan) -> Arena | None:
        pairs = list(zip(plan.devices, self._memories, strict=False))
        if len(pairs) != len(self._memories) or any(s.size > m.nbytes for s, m in pairs):
            return None
        if plan.devices == self._sections:
            return self
        other = copy.copy(self)  # it shares memories, copies and ownership
        other._sections, other._owner = plan.devices, self
        return other

    def _at(self, offset: int) -> tuple[Memory, int]:
        """Return the memory that holds the byte at `offset`, and the offset of the first byte of that memory."""
        for section, memory in zip(reversed(self._sections), reversed(self._memories), strict=True):
            if section.start <= offset and (section.size or not section.start):
                return memory, section.start
        raise AssertionError(offset)


def arena_for(plan: Plan, device: torch.device, room: int = 0) -> Arena:
    """Return a new arena for `plan`.

    Raises `InvalidPlan` if the plan exceeds its own budget, and `UnsupportedDevice` if no arena can be on `device`.

    `room`: the least size in bytes of an arena on one device.
    """
    require_supported(device)
    require_budget(plan)
    return Arenas(plan.devices) if plan.devices else Arena(max(plan.arena_size, room), device)


def grown(arena: Arena, plan: Plan, device: torch.device, room: int = 0, *, keep: bool = False) -> Arena:
    """Return a new arena for what fits in `arena` and for `plan`, and free `arena` first unless `keep` is set."""
    require_budget(plan)
    sections, nbytes = arena.sections, max(plan.arena_size, room, arena.nbytes)
    if not keep:
        arena.release()
    if not plan.devices:
        made = Arena(nbytes, device)
    elif len(sections) != len(plan.devices):
        made = Arenas(plan.devices)
    else:
        made = Arenas([max(of, key=lambda section: section.size) for of in zip(sections, plan.devices, strict=True)])
    return made


def arena_for_all(plans: Sequence[Plan], device: torch.device, room: int = 0) -> Arena:
    """Return a new arena that is large enough, on every device, for each of the plans."""
    largest = arena_for(max(plans, key=lambda plan: plan.arena_size), device, room)
    if all(largest.view_for(plan) for plan in plans):
        return largest
    sections = [max(of, key=lambda section: section.size) for of in zip(*(plan.devices for plan in plans), strict=True)]
    return Arenas(sections)


def view_of(storage: torch.UntypedStorage, value: Value, offset: int | None = None) -> torch.Tensor:
    """Return the tensor that `value` describes, over `storage`, at `offset` (in elements; by default its own)."""
    empty = torch.empty(0, dtype=dtype_of(value), device=storage.device)
    return empty.set_(storage, value.offset if offset is None else offset, value.shape, value.strides)


def view_within(base: Value, value: Value, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of `value`, a view of `base`, given the tensor of `base`."""
    return view_of(tensor.untyped_storage(), value, offset_within(base, value, int(tensor.storage_offset())))


def offset_within(base: Value, value: Value, start: int) -> int:
    """Return the storage offset of `value`, in its elements, if `base` starts at `start`, in elements of `base`.

    Both describe the same bytes in the trace; at run time the base may be at another place of a larger storage.
    """
    return value.offset + (start - base.offset) * dtype_of(base).itemsize // dtype_of(value).itemsize


def dtype_of(value: Value) -> torch.dtype:
    """Return the torch dtype of a value."""
    found = getattr(torch, value.dtype)
    assert isinstance(found, torch.dtype)
    return found
