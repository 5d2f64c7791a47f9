"""Compiles an allocator for pools, as two C functions: it returns a given address once, otherwise ordinary memory.

Ordinary memory can be scratch, which each round gets anew: the pools of ops that run one after another share it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,call-arg,unreachable"
from __future__ import annotations

from numba import carray, cfunc, types

from memplan.recording.allocator_kernel import pointer_to

ADDRESS, NBYTES, LOW, HIGH, SERVED, SCRATCH, CAPTURE, ROUND, BLOCKS = range(9)  # words of the state
TABLE, MOST_BLOCKS = 16, 64  # blocks of scratch: (address, bytes, the last round that used it) each
WORDS = TABLE + 3 * MOST_BLOCKS


def make_place(state: int, backing, exchange):
    """Return `allocate` and `release` (numba cfuncs, `.address`) over the words at `state`.

    A request of exactly NBYTES bytes gets ADDRESS, once. Releases of addresses in [LOW, HIGH), and of scratch, are
    ignored. In a ROUND other than 0, other requests get scratch that this round has not used yet. `exchange` is
    cudaThreadExchangeStreamCaptureMode: during a graph capture, memory may be allocated only in the mode that the
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
        if m[ROUND] != 0:
            for at in range(TABLE, TABLE + 3 * m[BLOCKS], 3):
                if m[at + 1] == int(size) and m[at + 2] != m[ROUND]:
                    m[at + 2] = m[ROUND]
                    return m[at]
        m[CAPTURE] = 2
        exchange(capture)
        m[SCRATCH] = 0
        if get(scratch, int(size)) != 0:  # then torch frees cached memory, tries again, and raises
            clear_error()
            m[SCRATCH] = 0
        exchange(capture)
        if m[ROUND] != 0 and m[SCRATCH] != 0 and m[BLOCKS] < MOST_BLOCKS:
            at = TABLE + 3 * m[BLOCKS]
            m[at], m[at + 1], m[at + 2] = m[SCRATCH], int(size), m[ROUND]
            m[BLOCKS] += 1
        return m[SCRATCH]

    @cfunc(types.void(types.uintp, types.uintp, types.int32, types.intp))
    def release(pointer, size, device, stream):
        m = carray(pointer_to(state), (WORDS,))
        address = int(pointer)
        for at in range(TABLE, TABLE + 3 * m[BLOCKS], 3):
            if m[at] == address:
                return
        if address < m[LOW] or address >= m[HIGH]:
            m[CAPTURE] = 2
            exchange(capture)
            put(address)
            exchange(capture)

    return allocate, release
