"""An allocator of host memory that replays a recording without a GPU."""

from __future__ import annotations

import ctypes

from memplan.recording.allocator import Allocator, Backing, abort

_Word = ctypes.c_size_t


def host_backing() -> Backing:
    """Return the backing of host memory."""
    libc = ctypes.CDLL(None)
    align, free = libc.posix_memalign, libc.free
    align.argtypes, align.restype = (_Word, _Word, _Word), ctypes.c_int
    free.argtypes, free.restype = (_Word,), ctypes.c_int
    made = ctypes.CFUNCTYPE(ctypes.c_int, _Word, _Word)(lambda place, size: int(align(place, 512, size)))
    spill = ctypes.CFUNCTYPE(ctypes.c_int, _Word, _Word, ctypes.c_uint)(
        lambda place, size, _: int(align(place, 512, size))
    )
    clear_error = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    return Backing(allocate=made, release=free, spill=spill, clear_error=clear_error, give_up=abort())


def counted(allocator: Allocator, what: str) -> int:
    """Return a number of the machine's header: "STEPS" replayed, allocations "LIVE" in the arena, bytes "CACHED"."""
    return int(allocator._m[getattr(allocator._kernel, what)])
