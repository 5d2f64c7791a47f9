"""The arena: blocks of memory, one on each device, and the tensors at addresses in them.

Every buffer gets a storage of its own that cannot be resized. Views of one large tensor would share a version counter,
would move under the absolute offsets of `as_strided`, and would let a kernel resize into neighbouring buffers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from memplan.core.graph import Value
from memplan.core.plan import Plan
from memplan.devices.host_memory import HostResults, host_bytes
from memplan.devices.kinds import is_accelerator, require_supported
from memplan.devices.streams import current_stream, is_capturing
from memplan.distributed.ops import StartedCollectives
from memplan.planning.planfile import require_budget
from memplan.runtime.copies import Copies, make_copies
from memplan.runtime.memory.arena_ownership import ArenaOwnership


class Memory:
    """A block of `nbytes` bytes on `device`; with `beside`, host memory for copies to and from that device.

    It is allocated when it is first used. Tensors made from it do not keep it alive: their owner must also keep a
    reference to the memory. While it is given back it has no bytes; it may be somewhere else once it is taken again.
    `taken` is called whenever its bytes were allocated.
    """

    def __init__(self, nbytes: int, device: torch.device, *, beside: torch.device | None = None) -> None:
        self.nbytes = nbytes
        self.device = torch.empty(0, device=device).device  # with an index
        self._beside = beside
        self.allocated: list[torch.Tensor] = []  # one tensor or none
        self.taken: Callable[[], object] = lambda: None

    @property
    def memory(self) -> torch.Tensor:
        """Its bytes, which are allocated again if they were given back."""
        if not self.allocated:
            if self._beside is not None:
                self.allocated.append(host_bytes(self.nbytes, self._beside))
            else:
                self.allocated.append(torch.empty(self.nbytes, dtype=torch.uint8, device=self.device))
            self.taken()
        elif self.nbytes and not self.allocated[0].data_ptr():
            self.allocated[0].untyped_storage().resize_(self.nbytes)
            self.taken()
        return self.allocated[0]

    @property
    def held(self) -> int:
        """The bytes that are allocated for it now."""
        return sum(made.untyped_storage().nbytes() for made in self.allocated)

    @property
    def address(self) -> int:
        """The address of its bytes."""
        return self.memory.data_ptr()

    def give_back(self) -> None:
        """Free its bytes until it is used again: until then, nobody may use tensors that were made from it."""
        for made in self.allocated:
            made.untyped_storage().resize_(0)

    def resize(self, nbytes: int) -> None:
        """Free its bytes, and have so many when it is used again."""
        self.give_back()
        self.allocated.clear()
        self.nbytes = nbytes

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a non-resizable storage of `nbytes` bytes at `offset`."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        pointer = self.address + offset
        made: Any = torch._C._construct_storage_from_data_pointer(pointer, self.device, nbytes)
        return made  # type: ignore[no-any-return]


class Arena:
    """The memory of a step, a block on each device. Offsets of a plan count through its blocks, laid end to end.

    Programs that share it run one at a time (`ownership`) and share its copies to the host. `collectives`: those that a
    step has started on it and not waited for. `uses`: of its bytes by streams, and of what programs keep beside it.
    `results`: makes the results that are copied to the host.
    `stays`: it is never given back while it is idle. `thread`: the one that began the last step in it.
    """

    stays = False
    thread = 0

    def __init__(self, nbytes: int, device: torch.device, *others: torch.device) -> None:
        """Make an arena of `nbytes` on a device, and of none yet on others."""
        self.memories = [Memory(nbytes, device), *(Memory(0, other) for other in others)]
        self.device = self.memories[0].device
        blocks = [memory.allocated for memory in self.memories]
        self.copies: Copies = make_copies(*(memory.device for memory in self.memories))
        self.collectives = StartedCollectives()
        weakref.finalize(self, self.copies.close, blocks)  # before its bytes are freed
        self.uses = StreamUses(*blocks)
        for memory in self.memories:
            memory.taken = self.uses.again
        drain = partial(_drain, self.copies, self.collectives)
        devices = dict.fromkeys(memory.device for memory in self.memories)
        self.ownership = ArenaOwnership(drain, make_stream_ordering(*devices, used_by=self.uses.by))
        self._whole: Arena | None = None
        self._host = Memory(0, torch.device("cpu"))
        self.results = HostResults(self.device)

    def part(self, ownership: ArenaOwnership) -> Arena:
        """Return the same memory with an ownership of its own."""
        ownership.drain, ownership.order_streams = self.ownership.drain, self.ownership.order_streams
        part = copy.copy(self)  # it has the same blocks, and keeps the whole arena alive
        part.ownership, part._whole = ownership, self.whole
        return part

    @property
    def whole(self) -> Arena:
        """The arena of which this is a part, or itself."""
        return self._whole or self

    @property
    def several(self) -> bool:
        """Whether it is on several devices."""
        return len(self.memories) > 1

    @property
    def nbytes(self) -> int:
        """The bytes of an arena on one device; 0 where several have a block."""
        return 0 if self.several else self.memories[0].nbytes

    @property
    def held(self) -> int:
        """The bytes that are allocated for it now."""
        return sum(memory.held for memory in self.memories)

    @property
    def memory(self) -> torch.Tensor:
        """The bytes of its first block."""
        return self.memories[0].memory

    @property
    def addresses(self) -> list[int]:
        """The addresses of its blocks, which are allocated again if they were given back."""
        return [memory.address for memory in self.memories]

    def shares_memory(self, other: Arena) -> bool:
        """Return whether another arena has the same blocks."""
        return self.memories is other.memories

    def host(self, nbytes: int) -> Memory:
        """Return at least `nbytes` of host memory for offloaded bytes; earlier memory is reused if large enough."""
        if nbytes > self._host.nbytes:
            self._host = Memory(nbytes, torch.device("cpu"), beside=self.device)
        return self._host

    def fits(self, plan: Plan, room: int = 0) -> bool:
        """Return whether it is large enough for a plan, and for `room` bytes on one device."""
        return all(size <= memory.nbytes for size, memory in zip(_sizes(plan, room), self.memories, strict=True))

    def fit(self, plan: Plan, room: int = 0) -> None:
        """Have room for a plan from now on; smaller blocks are freed first. No step may be in flight.

        Programs find their bytes where they are now when they begin a step.
        """
        for size, memory in zip(_sizes(plan, room), self.memories, strict=True):
            if size > memory.nbytes:
                memory.resize(size)

    def empty(self) -> None:
        """Free its bytes, although programs that nobody will run again may refer to it; one that runs makes room anew.

        Copies of a forward whose backward will not run are waited for.
        """
        self.ownership.drain()
        for memory in self.memories:
            memory.resize(0)

    def give_back(self) -> None:
        """Free its bytes until it is used again: until then, nobody may use tensors that were made from it."""
        for memory in self.memories:
            memory.give_back()

    def leave_bytes(self) -> None:
        """Leave the bytes to what refers to them; others take their place when it is used again."""
        for memory in self.memories:
            memory.allocated.clear()

    def bytes_at(self, plan: Plan, low: int, high: int) -> torch.Tensor:
        """Return the bytes [low, high) of a plan as a tensor."""
        memory, start = self._at(plan, low)
        return memory.memory[low - start : high - start]

    def storage(self, plan: Plan, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a non-resizable storage of `nbytes` bytes at an offset of a plan."""
        memory, start = self._at(plan, offset)
        return memory.storage(offset - start, nbytes)

    def _at(self, plan: Plan, offset: int) -> tuple[Memory, int]:
        """Return the block that holds the byte at an offset of a plan, and the offset of its first byte."""
        for section, memory in zip(reversed(plan.devices), reversed(self.memories), strict=False):
            if section.start <= offset and (section.size or not section.start):
                return memory, section.start
        return self.memories[0], 0


def _sizes(plan: Plan, room: int) -> list[int]:
    return [section.size for section in plan.devices] or [max(plan.arena_size, room)]


def _drain(copies: Copies, collectives: StartedCollectives) -> None:
    """Return when no copy, and no collective, uses the memory of a step that has ended."""
    copies.drain()
    collectives.drain()


def arena_for(plan: Plan, device: torch.device, room: int = 0) -> Arena:
    """Return a new arena for `plan`.

    Raises `InvalidPlan` if the plan exceeds its own budget, and `UnsupportedDevice` if no arena can be on `device`.

    `room`: the least size in bytes of an arena on one device.
    """
    require_supported(device)
    require_budget(plan)
    arena = Arena(0, *([torch.device(section.device) for section in plan.devices] or [device]))
    arena.fit(plan, room)
    return arena


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


Order = Callable[[], None]
Use = Callable[[torch.Stream], None]


def make_stream_ordering(*devices: torch.device, used_by: Use) -> Order:
    """Return the function to call when a step begins. On the CPU it does nothing: steps run one after another.

    `used_by` is called with each stream that a step is the first to run on since another one.
    """
    orderings = [StreamOrdering(device, used_by) for device in devices if is_accelerator(device)]

    def order_all() -> None:
        for order in orderings:
            order()

    return order_all


class StreamOrdering:
    """Makes the current stream of a device wait for the stream of the last step, if that is another one."""

    def __init__(self, device: torch.device, used_by: Use) -> None:
        self._device = device
        self._used_by = used_by
        self._last: torch.Stream | None = None

    def __call__(self) -> None:
        """Order the current stream after the last one. During a capture, the capturing code orders the streams."""
        current = current_stream(self._device)
        if current == self._last or is_capturing(self._device):
            return
        if self._last is not None:
            current.wait_stream(self._last)
        self._last = current
        self._used_by(current)


class StreamUses:
    """Keeps bytes, once they are freed, until what streams had launched by then is complete.

    torch's allocator gives freed bytes away at once on the stream on which they were allocated, and knows of no other.
    `allocations` are lists of tensors, which may still grow.
    """

    def __init__(self, *allocations: Sequence[torch.Tensor]) -> None:
        self._allocations = allocations
        self._beside: list[weakref.ref[torch.Tensor]] = []
        self._last: dict[torch.device, torch.Stream] = {}

    def by(self, stream: torch.Stream) -> None:
        """Note that a stream uses all bytes from now on."""
        self._last[stream.device] = stream
        self._beside = [ref for ref in self._beside if ref() is not None]
        beside = (ref() for ref in self._beside)
        self._note(stream, chain(*self._allocations, (t for t in beside if t is not None)))

    def of(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that the steps also use these tensors, as long as somebody else keeps them."""
        made = [t for t in tensors if is_accelerator(t.device)]
        self._beside += map(weakref.ref, made)
        for stream in self._last.values():
            self._note(stream, made)

    def again(self) -> None:
        """Note that the streams of before use allocations that were made again."""
        for stream in self._last.values():
            self._note(stream, chain(*self._allocations))

    @staticmethod
    def _note(stream: torch.Stream, tensors: Iterable[torch.Tensor]) -> None:
        for made in tensors:
            if made.device == stream.device:
                made.record_stream(stream)
