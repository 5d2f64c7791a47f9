"""Moves gradients out of the arena, because those of the last step are still in use at the next call.

From then on the model is compiled with `gradients="added"`, for gradients outside of the arena.
"""

from __future__ import annotations

import logging

from memplan.core.units import format_bytes
from memplan.runtime.execute.arena_gradients import ArenaGradients, Parked, referred, unpark

_log = logging.getLogger("memplan")
_STILL_SET = (
    "%s: gradients of the last step are still set at the next call, so they are outside the arena from now on, and are "
    'added to; gradients="added" does that from the first step on, and zero_grad() before each call avoids it'
)
_KEPT = (
    "%s: something else than its parameter's .grad still refers to the gradient of %r, and keeps an arena of %s; from "
    'now on gradients are outside the arena, as with gradients="added"'
)


def leave_arena(gradients: ArenaGradients, *, has_budget: bool) -> None:
    """Move gradients out of the arena, and free it, unless something else than Python names refers to one.

    Raises `StaleActivationsError` where something does and there is a budget, which two arenas would break. Gradients
    that do not fit beside the arena wait on the host until it is freed; on the CPU, in a temporary file.
    """
    model = gradients.plan.model
    parked: Parked = []
    with gradients.arena.ownership:  # no other thread may begin a step in between
        try:
            if has_budget and gradients.lacks_room:
                gradients.park(parked)
            if gradients.try_to_clear():
                _log.info(_STILL_SET, model)
                gradients.arena.release()
                return
            name = gradients.holder() or ""
        finally:
            unpark(parked)
        if has_budget:
            raise referred(name, 'or compile with gradients="added"')
        _log.warning(_KEPT, model, name, format_bytes(gradients.arena.nbytes))
