"""The state machine of a replay over one array of integers, so that an allocator can run it without Python.

`serve` answers each allocation of a step from the tape as long as the step equals the recorded one: the same sizes in
the same order on the same streams, and every allocation released before its bytes are reused. From the first difference
on, the rest of the step gets ordinary memory, and allocations in the arena stay where they are. Ordinary memory that is
released is cached for later allocations of the same size on the same stream. All sizes and addresses are bytes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,call-arg,unreachable"
from __future__ import annotations

import ctypes

import numpy as np
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

# The layout of the array: a header, then tables of fixed size.
(
    MODE,
    CURSOR,
    COUNT,
    ARENA,
    ARENA_SIZE,
    LIVE,
    DIFFERENCE,
    AT,
    SIZE,
    EVENTS,
    SPARE,
    CACHED,
    PLACES,
    STEPS,
    SCRATCH,
    SPILLED,
) = range(16)
HEADER = 64
OFF, RECORD, REPLAY = range(3)  # modes
SAME, OTHER_SIZE, LIVES_LONGER, MORE, STILL_ALIVE, FEWER, OTHER_STREAM = range(7)  # differences
MAX_EVENTS, MAX_COUNT, MAX_BEFORE, MAX_NODES, SLOTS = 1 << 19, 1 << 17, 1 << 19, 1 << 17, 1 << 14
T_EVENTS = HEADER
T_SIZES = T_EVENTS + 3 * MAX_EVENTS  # (address, bytes, lane) each
T_OFFSETS = T_SIZES + MAX_COUNT
T_LANES = T_OFFSETS + MAX_COUNT  # the stream and device of allocation k
T_FIRST = T_LANES + MAX_COUNT  # where the entries of allocation k begin in T_BEFORE
T_BEFORE = T_FIRST + MAX_COUNT + 1
T_ALIVE = T_BEFORE + MAX_BEFORE
T_PLACE = T_ALIVE + MAX_COUNT  # the index of allocation k's offset in T_PLACES
T_PLACES = T_PLACE + MAX_COUNT  # the distinct offsets, ascending
T_OWNER = T_PLACES + MAX_COUNT  # the allocation that has the bytes at each of them, plus one
T_HEADS = T_OWNER + MAX_COUNT  # the heads of the lists of cached blocks, by hash of size and stream
T_NODES = T_HEADS + SLOTS  # (address, size, stream and device, next)
WORDS = T_NODES + 4 * MAX_NODES


@njit(cache=True)
def rounded(size):
    """Return the bytes of ordinary memory for a request, rounded to few sizes so that cached blocks fit again."""
    grain = 512 if size < 1 << 20 else 1 << 21
    return (size + grain - 1) // grain * grain


@njit(cache=True)
def note(m, address, nbytes, lane):
    """Record an event: an allocation, or (`nbytes` 0) a release. Events beyond the table's size are only counted."""
    if m[MODE] == RECORD:
        at = m[EVENTS]
        if at < MAX_EVENTS:
            m[T_EVENTS + 3 * at] = address
            m[T_EVENTS + 3 * at + 1] = nbytes
            m[T_EVENTS + 3 * at + 2] = lane
        m[EVENTS] += 1


@njit(cache=True)
def differs(m, why, size):
    """Note that the step differs from the recorded one, and stop serving it."""
    m[MODE] = OFF
    m[DIFFERENCE] = why
    m[AT] = m[CURSOR]
    m[SIZE] = size


@njit(cache=True)
def begin(m):
    """Start a step. It counts as different if the arena still holds allocations of the last one."""
    m[CURSOR] = 0
    m[DIFFERENCE] = SAME
    m[MODE] = REPLAY
    if m[LIVE] > 0:
        differs(m, STILL_ALIVE, 0)


@njit(cache=True)
def end(m):
    """End a step, and return how it differs from the recorded one (SAME: not at all)."""
    if m[MODE] == REPLAY and m[CURSOR] < m[COUNT]:
        differs(m, FEWER, 0)
    m[MODE] = OFF
    m[STEPS] += m[DIFFERENCE] == SAME
    return m[DIFFERENCE]


@njit(cache=True)
def serve(m, size, lane):
    """Return the planned address of the next allocation, or 0 if it gets ordinary memory.

    On another stream than when recorded, it could overwrite what a stream still reads that released its bytes.
    """
    if m[MODE] != REPLAY:
        return 0
    k = m[CURSOR]
    if k >= m[COUNT]:
        differs(m, MORE, size)
        return 0
    if m[T_SIZES + k] != size:
        differs(m, OTHER_SIZE, size)
        return 0
    if m[T_LANES + k] != lane:
        differs(m, OTHER_STREAM, size)
        return 0
    if m[T_OFFSETS + k] < 0:
        m[CURSOR] = k + 1
        return 0
    for i in range(m[T_FIRST + k], m[T_FIRST + k + 1]):
        if m[T_ALIVE + m[T_BEFORE + i]]:
            differs(m, LIVES_LONGER, size)
            return 0
    m[CURSOR] = k + 1
    m[T_ALIVE + k] = 1
    m[T_OWNER + m[T_PLACE + k]] = k + 1
    m[LIVE] += 1
    return m[ARENA] + m[T_OFFSETS + k]


@njit(cache=True)
def give_back(m, address):
    """Release an allocation of `serve`; return False for an address outside the arena."""
    offset = address - m[ARENA]
    if m[ARENA] == 0 or offset < 0 or offset >= max(m[ARENA_SIZE], 1):
        return False
    low, high = 0, m[PLACES]
    while low < high:
        middle = (low + high) // 2
        if m[T_PLACES + middle] < offset:
            low = middle + 1
        else:
            high = middle
    k = m[T_OWNER + low] - 1
    if k >= 0 and m[T_ALIVE + k]:
        m[T_ALIVE + k] = 0
        m[LIVE] -= 1
    return True


@njit(cache=True)
def _head(size, lane):
    return T_HEADS + (size * 31 + lane * 7919) % SLOTS


@njit(cache=True)
def take(m, size, lane):
    """Return a cached block of `size` bytes (rounded), last used on the same lane (a stream of a device), or 0."""
    link = _head(size, lane)
    while m[link] != 0:
        node = T_NODES + 4 * (m[link] - 1)
        if m[node + 1] == size and m[node + 2] == lane:
            number = m[link]
            m[link] = m[node + 3]
            m[node + 3] = m[SPARE]
            m[SPARE] = number
            m[CACHED] -= size
            return m[node]
        link = node + 3
    return 0


@njit(cache=True)
def keep(m, address, size, lane):
    """Cache a released block; return False when the table of cached blocks is full."""
    number = m[SPARE]
    if number == 0:
        return False
    node = T_NODES + 4 * (number - 1)
    m[SPARE] = m[node + 3]
    head = _head(size, lane)
    m[node], m[node + 1], m[node + 2], m[node + 3] = address, size, lane, m[head]
    m[head] = number
    m[CACHED] += size
    return True


@njit(cache=True)
def let_go(m):
    """Remove one block from the cache and return its address, or 0 when the cache is empty."""
    for slot in range(T_HEADS, T_HEADS + SLOTS):
        if m[slot] != 0:
            number = m[slot]
            node = T_NODES + 4 * (number - 1)
            m[slot] = m[node + 3]
            m[node + 3] = m[SPARE]
            m[SPARE] = number
            m[CACHED] -= m[node + 1]
            return m[node]
    return 0


def new_machine():
    """Return the array with an empty tape and an empty cache."""
    m = np.zeros(WORDS, np.int64)
    m[T_NODES + 3 :: 4] = np.arange(2, MAX_NODES + 2)
    m[T_NODES + 4 * MAX_NODES - 1] = 0
    m[SPARE] = 1
    return m


def load(m, tape, address):
    """Load a tape whose arena is at `address`; return False if the tables are too small or the arena is in use."""
    count, before = len(tape.sizes), sum(map(len, tape.before))
    if count > MAX_COUNT or before > MAX_BEFORE or m[LIVE] > 0:
        return False
    offsets = np.array(tape.offsets, np.int64)
    places = np.unique(offsets[offsets >= 0])
    m[T_SIZES : T_SIZES + count] = tape.sizes
    m[T_OFFSETS : T_OFFSETS + count] = offsets
    m[T_LANES : T_LANES + count] = tape.lanes
    m[T_FIRST] = 0
    m[T_FIRST + 1 : T_FIRST + count + 1] = np.cumsum([len(b) for b in tape.before])
    m[T_BEFORE : T_BEFORE + before] = [j for b in tape.before for j in b]
    m[T_ALIVE : T_ALIVE + count] = 0
    m[T_PLACE : T_PLACE + count] = np.searchsorted(places, offsets)
    m[T_PLACES : T_PLACES + len(places)] = places
    m[T_OWNER : T_OWNER + len(places)] = 0
    m[COUNT], m[PLACES], m[ARENA], m[ARENA_SIZE] = count, len(places), address, tape.arena_size
    return True


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
