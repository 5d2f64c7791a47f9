"""The rule for idle arenas: one that lies idle while the program needs the memory is given back until its next step.

An arena is idle while none of its steps runs or waits for its backward. On an accelerator, it is given back when a step
has left nothing in it, and taking it again is a hit in the caching allocator of torch. On the CPU, where new memory
costs page faults, it is given back when a step begins in another arena and the idle bytes are more than 5 % of what
that step needs, or when the original model runs in the place of a compiled one. Gradients in an arena keep it, until
other steps begin: then they move out, unless other threads of the program run (daemons apart), which may be changing
them. An arena stays where recorded steps know its address.

The next step takes the bytes again. Where they are at another address, all views of them are bound again, which
`Runner.rebound` counts.
"""

from __future__ import annotations

import threading
import weakref

from memplan.devices.kinds import is_accelerator
from memplan.runtime.memory.arena import Arena

_SHARE = 0.05  # of the bytes that a step on the CPU needs: an idle arena beside it may have no more
_USED: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()  # those of all threads, by their bytes


def begin_step(arena: Arena, need: int) -> None:
    """Give back what idles beside a step of this thread that is about to run in an arena, and needs so many bytes."""
    arena.thread = threading.get_ident()
    _USED[id(arena.memories)] = arena
    if len(_USED) == 1:
        return
    least = 0 if is_accelerator(arena.device) else need * _SHARE
    for reference in list(_USED.valuerefs()):  # at once: another thread may add one
        other = reference()
        if other is None or other.shares_memory(arena) or other.device != arena.device:
            continue
        if other.thread != arena.thread or other.held <= least:
            continue
        if not other.ownership.left or len(_threads()) == 1:  # another thread may be changing what would move
            give_back(other)


def _threads() -> list[threading.Thread]:
    """Return the threads of the program, daemons apart."""
    return [thread for thread in threading.enumerate() if not thread.daemon]


def end_step(arena: Arena) -> None:
    """Give the arena of a step that has ended back at once, on an accelerator, if nothing is left in it."""
    if is_accelerator(arena.device) and not arena.ownership.is_in_use and not arena.ownership.left:
        _give_back(arena)


def give_back(arena: Arena) -> bool:
    """Give the bytes of an arena back until a step runs in it; return False where it is in use, or has to stay.

    Gradients move out first.
    """
    try:
        with arena.ownership as ownership:
            if ownership.is_in_use:
                return False
            ownership.clear_left()
            return _give_back(arena)
    except Exception:  # another thread runs a step, there is no room for gradients beside it: nothing has to be given
        return False


def _give_back(arena: Arena) -> bool:
    if arena.stays:
        return False
    arena.ownership.drain()
    arena.give_back()
    return True
