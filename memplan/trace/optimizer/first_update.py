"""Calls compiled modules around the first step of an optimizer, with the bytes that it allocates.

Torch calls the hooks on all optimizers one after another, and none may be removed meanwhile. So there are two hooks of
memplan's, before and after a step, from the first time that something waits; they do nothing else than tell what waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.trace.optimizer.update_bytes import bytes_of_step

_TRIES = 4  # steps of one optimizer: gradients that something else refers to, say, may be free at a later one
_NONE = "an update without optimizer"
_log = logging.getLogger("memplan")


class FirstUpdate:
    """Waits for an optimizer that updates some of `parameters`, and calls `make_room` right before its first `step()`.

    `make_room` is a method, whose object is not kept alive. It is called with this: `name` says what updates,
    and `nbytes` are what its `step()` allocates beside its state (0 if that is not known). It returns whether room was
    made, which is room for every optimizer that allocates no more; it is called again a few times if not. Where
    `step(closure)` calls the model itself, it is called right after it: there are no gradients before. `is_unknown`:
    such a `step()` allocates bytes that are not known.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[torch.Tensor]], make_room: Callable[[FirstUpdate], bool]
    ) -> None:
        self.name, self.nbytes, self.is_unknown = "", 0, False
        self._room = -1  # bytes that room was made for; -1: none was
        self._parameters, self._make_room = parameters, weakref.WeakMethod(make_room)
        self._tries: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        _WAITING.add(self)
        _hook_into_optimizers()

    def measure(self, optimizer: torch.optim.Optimizer, *, calls_model: bool) -> None:
        """Measure an optimizer whose gradients are there, if it updates any of the parameters, and was not before."""
        tries = self._tries.get(optimizer, _TRIES)
        if not tries:
            return
        own = {id(p) for p in self._parameters()}
        updates = not own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"])
        found = bytes_of_step(optimizer) if updates else None
        nbytes = (found or 0) if updates else -1
        make_room = self._make_room()
        if nbytes <= self._room or make_room is None:
            self._tries[optimizer] = 0
            return
        self._tries[optimizer] = tries - 1
        self.name, self.nbytes = f"{type(optimizer).__name__}.step()", nbytes
        self.is_unknown = calls_model and found is None
        if make_room(self):
            self._room, self._tries[optimizer] = nbytes, 0

    def expect_none(self) -> None:
        """Have room made as for an update that allocates nothing, once: the first steps ended without an optimizer."""
        make_room = self._make_room()
        if not self.name and make_room is not None:
            self.name = _NONE
            make_room(self)

    def report(self, before: Plan, after: Plan, loss: int) -> None:
        """Log that a plan takes the place of another one because of the update, and of `loss` bytes of the caller."""
        _log.info(
            "%s: %s allocates %s beside the idle arena, and the loss before it %s, in all more than eager "
            "needs; planned again with an arena of %s instead of %s, and results outside of it",
            *(before.model, self.name or _NONE, format_bytes(self.nbytes), format_bytes(loss)),
            *(format_bytes(after.arena_size), format_bytes(before.arena_size)),
        )


_WAITING: weakref.WeakSet[FirstUpdate] = weakref.WeakSet()


@cache
def _hook_into_optimizers() -> None:
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let those that wait measure an optimizer that is about to run, unless it calls the model itself."""
    if _WAITING and not _calls_model(args, kwargs):
        _measure(optimizer, calls_model=False)


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let those that wait measure an optimizer that has called the model itself, and has run."""
    if _WAITING and _calls_model(args, kwargs):
        _measure(optimizer, calls_model=True)


HOOKS = (before_step, after_step)


def _calls_model(args: Any, kwargs: Any) -> bool:
    """Return whether a `step()` got a closure; the optimizer itself is the first argument."""
    return any(callable(x) for x in (*args[1:], *kwargs.values()))


def _measure(optimizer: torch.optim.Optimizer, *, calls_model: bool) -> None:
    if not torch.compiler.is_compiling():
        for waiting in tuple(_WAITING):
            waiting.measure(optimizer, calls_model=calls_model)
