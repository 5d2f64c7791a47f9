"""Compiles the two C functions of a replay over its array of state."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,call-arg,unreachable"
from __future__ import annotations

import ctypes

from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from memplan.recording.machine_kernel import (
    MODE,
    RECORD,
    SCRATCH,
    SPILLED,
    WORDS,
    give_back,
    keep,
    let_go,
    note,
    rounded,
    serve,
    take,
)

_OUT_OF_MEMORY = ctypes.create_string_buffer(
    b"memplan: out of memory, on the device and beside it; torch has no way to tell the program, so it ends here\n"
)


@intrinsic
def pointer_to(typing_context, address):
    """Return an integer as a pointer to int64."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(address), generate


@njit
def _lane(device, stream):
    return stream * 64 + device


def make_functions(machine: int, mutex: int, backing):
    """Return `allocate` and `release` (numba cfuncs, `.address`) over the array at `machine`, locked by `mutex`."""
    libc = ctypes.CDLL(None)
    lock, unlock = libc.pthread_mutex_lock, libc.pthread_mutex_unlock
    for function in (lock, unlock):
        function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    write = libc.write
    write.argtypes, write.restype = (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t), ctypes.c_ssize_t
    get, put, spill = backing.allocate, backing.release, backing.spill
    clear_error, give_up = backing.clear_error, backing.give_up
    scratch, words, length = machine + 8 * SCRATCH, ctypes.addressof(_OUT_OF_MEMORY), len(_OUT_OF_MEMORY) - 1

    @njit
    def fresh(m, size):
        m[SCRATCH] = 0
        if get(scratch, size) != 0:
            clear_error()  # the next check of a kernel's launch would report it
            m[SCRATCH] = 0
        return m[SCRATCH]

    @njit
    def beyond(m, size):
        m[SCRATCH] = 0
        if spill(scratch, size, 1) != 0:  # cudaMemAttachGlobal
            clear_error()
            write(2, words, length)
            give_up()
            return 0
        m[SPILLED] += size
        return m[SCRATCH]

    @cfunc(types.uintp(types.uintp, types.int32, types.intp))
    def allocate(size, device, stream):
        if size == 0:
            return 0
        lock(mutex)
        m = carray(pointer_to(machine), (WORDS,))
        wanted = int(size)
        lane = _lane(device, stream)
        address = serve(m, wanted, lane) if device == 0 else 0
        if address == 0:
            room = rounded(wanted)
            address = take(m, room, lane)
            if address == 0:
                address = fresh(m, room)
            while address == 0:  # out of memory: free cached blocks one by one
                gone = let_go(m)
                if gone == 0:
                    break
                put(gone)
                address = fresh(m, room)
            if address == 0:
                address = beyond(m, room)
        if m[MODE] == RECORD and device == 0:
            note(m, address, wanted, lane)
        unlock(mutex)
        return address

    @cfunc(types.void(types.uintp, types.uintp, types.int32, types.intp))
    def release(pointer, size, device, stream):
        if pointer == 0:
            return
        lock(mutex)
        m = carray(pointer_to(machine), (WORDS,))
        address = int(pointer)
        if m[MODE] == RECORD and device == 0:
            note(m, address, 0, _lane(device, stream))
        if not give_back(m, address) and not keep(m, address, rounded(int(size)), _lane(device, stream)):
            put(address)
        unlock(mutex)

    return allocate, release
