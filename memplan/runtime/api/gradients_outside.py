"""Moves gradients out of the arena, because those of the last step are still in use at the next call.

From then on the model is compiled with `gradients="added"`, for gradients outside of the arena.
"""

from __future__ import annotations

import logging

from memplan.core.units import format_bytes
from memplan.errors import StaleActivationsError
from memplan.runtime.execute.arena_gradients import ArenaGradients, referred

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

    Raises `StaleActivationsError` in that case if there is a budget, which two arenas would break.
    """
    model = gradients.plan.model
    with gradients.arena.ownership:  # no other thread may begin a step in between
        if gradients.try_to_clear():
            _log.info(_STILL_SET, model)
            gradients.arena.release()
            return
        name = gradients.holder() or ""
        if has_budget:
            raise referred(name, 'or compile with gradients="added"')
        _log.warning(_KEPT, model, name, format_bytes(gradients.arena.nbytes))


def require_room_outside(gradients: ArenaGradients) -> None:
    """Raise `StaleActivationsError` if the gradients, outside of the arena, would break the budget together with it."""
    if not gradients.lacks_room:
        return
    plan = gradients.plan
    assert plan.eviction is not None
    need, limit = format_bytes(plan.total + gradients.nbytes), format_bytes(plan.eviction.budget or 0)
    raise StaleActivationsError(
        f"gradients of the last step are still set, and take {format_bytes(gradients.nbytes)} of the arena; moved out, "
        f"the step would need {need}, and the budget is {limit}",
        hint='call zero_grad() before each call, or compile with gradients="added", which adds to gradients outside of '
        "the arena, within the budget",
        see="gradient-kept",
    )
