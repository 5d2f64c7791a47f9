"""The replay as two C functions, `allocate(size, device, stream)` and `release(pointer, size, device, stream)`.

PyTorch's pluggable allocator takes such functions (docs: notes/cuda, "Using custom memory allocators"). They run
without the Python interpreter and its lock, under a lock of their own. Memory that is not on the tape comes from
`Backing`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memplan.errors import MemplanError
from memplan.recording.tape import Tape, TapeEvent

_Word = ctypes.c_size_t


@dataclass(frozen=True, slots=True)
class Backing:
    """The allocator of memory that is not planned, as C functions of integers.

    `allocate` writes the address to where its first argument points (as cudaMalloc) and returns 0, or an error;
    `release` takes the address. `spill` is like `allocate`, with flags, for memory that serves when the device has no
    more; `clear_error` makes the runtime forget its last error. `give_up` ends the process: torch uses whatever address
    it is given, and cannot be told that there is none.
    """

    allocate: Callable[[int, int], int]
    release: Callable[[int], int]
    spill: Callable[[int, int, int], int]
    clear_error: Callable[[], int]
    give_up: Callable[[], int]


def cuda_backing(library: ctypes.CDLL) -> Backing:
    """Return cudaMalloc and cudaFree of the CUDA runtime that the process has loaded."""
    allocate, release = library.cudaMalloc, library.cudaFree
    allocate.argtypes, allocate.restype = (_Word, _Word), ctypes.c_int
    release.argtypes, release.restype = (_Word,), ctypes.c_int
    clear_error, spill = library.cudaGetLastError, library.cudaMallocManaged
    spill.argtypes, spill.restype = (_Word, _Word, ctypes.c_uint), ctypes.c_int
    clear_error.argtypes, clear_error.restype = (), ctypes.c_int
    return Backing(allocate=allocate, release=release, spill=spill, clear_error=clear_error, give_up=abort())


def abort() -> Callable[[], int]:
    """Return the C function that ends the process."""
    abort = ctypes.CDLL(None).abort
    abort.argtypes, abort.restype = (), ctypes.c_int
    return abort


class Allocator:
    """The state of a replay, its two C functions and its arena.

    It must exist as long as any memory that it allocated, which in practice is until the process ends.
    """

    def __init__(self, backing: Backing) -> None:
        from memplan.recording import machine_kernel
        from memplan.recording.machine_kernel import make_functions

        self._kernel: Any = machine_kernel
        self._m: Any = self._kernel.new_machine()
        self._backing = backing
        self._mutex = ctypes.create_string_buffer(64)  # a pthread_mutex_t of zeros is unlocked
        self._functions = make_functions(self._m.ctypes.data, ctypes.addressof(self._mutex), backing)
        self._arena = 0
        self._loaded: Tape | None = None
        self.differences = 0  # steps that differed from the recorded one, since a tape was loaded

    @property
    def pointers(self) -> tuple[int, int]:
        """Addresses of `void* allocate(size_t, int, void*)` and `void release(void*, size_t, int, void*)`."""
        return self._functions[0].address, self._functions[1].address

    def start_recording(self) -> None:
        """Record all allocations and releases from now on."""
        self._m[self._kernel.EVENTS] = 0
        self._m[self._kernel.MODE] = self._kernel.RECORD

    def stop_recording(self) -> list[TapeEvent]:
        """Stop recording and return the events. Raises `MemplanError` when there were too many to record."""
        k, m = self._kernel, self._m
        m[k.MODE] = k.OFF
        count = int(m[k.EVENTS])
        if count > k.MAX_EVENTS:
            what = f"{count} allocations and releases in one step, {k.MAX_EVENTS} can be recorded"
            raise MemplanError(what, hint="record a smaller part of the step")
        found = m[k.T_EVENTS : k.T_EVENTS + 3 * count].reshape(-1, 3).tolist()
        return [TapeEvent(address, nbytes, lane=lane) for address, nbytes, lane in found]

    def load(self, tape: Tape) -> None:
        """Replay `tape` from now on, in an arena that is allocated now. Raises `MemplanError` without room for it."""
        if tape is self._loaded:
            return
        if self._loaded is not None and self._m[self._kernel.LIVE]:
            hint = "release what the last replayed step left"
            raise MemplanError("memory of another recording's arena is in use", where="replay", hint=hint)
        place = ctypes.c_size_t(0)
        if self._backing.allocate(ctypes.addressof(place), max(tape.arena_size, 512)) or not place.value:
            hint = "free memory of the device, or record a smaller part of the step"
            raise MemplanError(f"no memory for an arena of {tape.arena_size} bytes", where="replay", hint=hint)
        if not self._kernel.load(self._m, tape, place.value):
            self._backing.release(place.value)
            what = f"{len(tape.sizes)} allocations, {self._kernel.MAX_COUNT} can be replayed"
            raise MemplanError(what, where="replay", hint="record a smaller part of the step")
        if self._arena:
            self._backing.release(self._arena)
        self._arena, self._loaded, self.differences = place.value, tape, 0
        self._m[self._kernel.STEPS] = 0

    def begin(self) -> None:
        """Start a replayed step."""
        self._kernel.begin(self._m)

    def end(self) -> str:
        """End the step, and return "" if it equalled the recorded one, else how it differed first."""
        k, m = self._kernel, self._m
        why = int(k.end(m))
        self.differences += why != k.SAME
        at, size = int(m[k.AT]), int(m[k.SIZE])
        recorded = int(m[k.T_SIZES + at]) if at < int(m[k.COUNT]) else 0
        return {
            k.SAME: "",
            k.OTHER_SIZE: f"allocation {at} asks for {size} bytes, recorded were {recorded}",
            k.LIVES_LONGER: f"allocation {at} would overwrite what was released before it when recorded",
            k.MORE: f"allocation {at} comes after the last recorded one",
            k.STILL_ALIVE: f"{int(m[k.LIVE])} allocations of an earlier step are still alive",
            k.OTHER_STREAM: f"allocation {at} is of another stream than when recorded",
            k.FEWER: f"it stopped before allocation {at} of {int(m[k.COUNT])}",
        }[why]

    def take_spilled(self) -> int:
        """Return the bytes that the device had no room for, and that are beside its memory, since the last call."""
        k, m = self._kernel, self._m
        found, m[k.SPILLED] = int(m[k.SPILLED]), 0
        return found
