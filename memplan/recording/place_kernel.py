"""Compiles an allocator for pools, as two C functions: it returns a given address once, otherwise ordinary memory."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,call-arg,unreachable"
from __future__ import annotations

from numba import carray, cfunc, types

from memplan.recording.allocator_kernel import pointer_to

ADDRESS, NBYTES, LOW, HIGH, SERVED, SCRATCH, CAPTURE = range(7)  # words of the state
WORDS = 8


def make_place(state: int, backing, exchange):
    """Return `allocate` and `release` (numba cfuncs, `.address`) over the words at `state`.

    A request of exactly NBYTES bytes gets ADDRESS, once. Releases of addresses in [LOW, HIGH) are ignored. `exchange`
    is cudaThreadExchangeStreamCaptureMode: during a graph capture, memory may be allocated only in the mode that the
    caching allocator uses for it, "relaxed" (2).
    """
    get, put, clear_error = backing.allocate, backing.release, backing.clear_error
    scratch, capture = state + 8 * SCRATCH, state + 8 * CAPTURE

    @cfunc(types.uintp(types.uintp, types.int32, types.intp))
    def allocate(size, device, stream):
        m = carray(pointer_to(state), (WORDS,))
        if m[ADDRESS] != 0 and int(size) == m[NBYTES]:
            found = m[ADDRESS]
            m[ADDRESS] = 0
            m[SERVED] += 1
            return found
        m[CAPTURE] = 2
        exchange(capture)
        m[SCRATCH] = 0
        if get(scratch, int(size)) != 0:  # then torch frees cached memory, tries again, and raises
            clear_error()
            m[SCRATCH] = 0
        exchange(capture)
        return m[SCRATCH]

    @cfunc(types.void(types.uintp, types.uintp, types.int32, types.intp))
    def release(pointer, size, device, stream):
        m = carray(pointer_to(state), (WORDS,))
        address = int(pointer)
        if address < m[LOW] or address >= m[HIGH]:
            m[CAPTURE] = 2
            exchange(capture)
            put(address)
            exchange(capture)

    return allocate, release
