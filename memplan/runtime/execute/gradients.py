"""The gradients of parameters that a step has made, in the arena until its bytes are needed again.

They use the bytes of freed activations, so that a step takes no more than its own peak. What is still in use of them
when the next program begins moves out.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch

from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime.execute.program import Program
from memplan.runtime.guards.parameter_guards import ParameterGuards

_log = logging.getLogger("memplan")
_ALONE = 2  # references to the tensor of a `.grad` if only its parameter and its Python object refer to it
_KEPT = (
    "%s: something else than its parameter's .grad still refers to the gradient of %r, and keeps a block of %s that it "
    'lies in; from now on gradients are copied out when the backward ends; gradients="outside" has them there at once'
)


class ArenaGradients:
    """The gradients of one program that are in the arena between its steps.

    `slots` (positions in `held`) are their parameters, `values` their values in the program. A reference to one of them
    keeps the block in which it lies alive. `copied`: they are copied out when the backward ends, because something kept
    one, or because the arena cannot leave its block.
    """

    def __init__(
        self, held: ParameterGuards, slots: Sequence[int], values: Sequence[int], program: Program, *, copied: bool
    ) -> None:
        self._held, self._plan, self.arena = held, program.plan, program.arena
        self.copied = copied or program.arena.several
        tensors = [program.namespace.names[f"v{value}"] for value in values]
        self._slots = [slot for slot, t in zip(slots, tensors, strict=True) if t.numel()]
        self._storages = [t.untyped_storage() for t in tensors if t.numel()]
        self._addresses = [storage._cdata for storage in self._storages]
        self._keep_alive()
        self._unreferenced = self._references()

    def _keep_alive(self) -> None:
        """Have each storage keep the block of the arena in which it lies."""
        for storage in self._storages:
            storage.arena = self.arena.memory

    def _references(self) -> list[int]:
        """Return for each storage the number of tensors that use it, and of references to its Python object."""
        return [*map(torch._C._storage_Use_Count, self._addresses), *map(sys.getrefcount, self._storages)]

    def clear(self) -> None:
        """Have nothing refer to the arena's bytes any more, because they are about to be used, or given back.

        Each `.grad` moves out. Where anything else refers to a gradient, the arena leaves its block to that, and takes
        another one; from then on gradients are copied out when the backward ends.

        Raises `BudgetInfeasible` if a budget has no room for gradients beside the arena, and `StaleActivationsError` if
        it has none for two arenas.
        """
        if self._references() == self._unreferenced:
            return
        plan = self._plan
        budget = None if plan.eviction is None else plan.eviction.budget
        need = plan.total + sum(storage.nbytes() for storage in self._storages)
        if budget is not None and need > budget:
            raise BudgetInfeasible(
                f"gradients of the last step are still set; beside the next one they need {format_bytes(need)} in all, "
                f"the budget is {format_bytes(budget)}",
                op="",
                smallest=need,
                where="the gradients of the last step",
                hint='call zero_grad() before each call, compile with gradients="outside", which plans for them, or '
                f"give at least {need} bytes",
            )
        self._move_out()
        if (name := self._holder()) is None:
            return
        if budget is not None:
            raise StaleActivationsError(
                f"the gradient of {name!r} is still referred to by something else than its parameter's .grad (a view, "
                "an array, a result of autograd.grad, another name), and the budget has no room for a second arena",
                hint='drop that before the next step, keep a copy of it, or compile with gradients="outside"',
                see="gradient-kept",
            )
        _log.warning(_KEPT, plan.model, name, format_bytes(self.arena.nbytes))
        self.copied = True
        self.arena.leave_bytes()

    def _move_out(self) -> None:
        """Move each `.grad` that is in the arena to memory of its own."""
        here = set(self._addresses)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._held.tensors():
                _move(parameter, here)
        if self._references() != self._unreferenced:
            _end_failed_backward()

    def _holder(self) -> str | None:
        """Return the name of a parameter whose gradient in the arena something refers to; None if there is none."""
        now, free = self._references(), self._unreferenced
        both = [*self._slots, *self._slots]
        slot = next((slot for slot, one, two in zip(both, now, free, strict=True) if one != two), None)
        return None if slot is None else self._held.names[slot]

    def copies(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return gradients of a backward, with copies of those that are in the arena."""
        here = set(self._addresses)
        return tuple(g.clone() if g.untyped_storage()._cdata in here else g for g in gradients)


def _move(parameter: torch.Tensor | None, here: set[int]) -> None:
    """Move `.grad` out of the arena; it stays the same tensor object, unless it is a view."""
    if parameter is None:  # the model has none there any more
        return
    gradient = parameter.grad
    if gradient is None or gradient.untyped_storage()._cdata not in here:
        return
    if gradient._is_view():
        parameter.grad = gradient.clone()
    elif gradient._use_count() <= _ALONE:  # type: ignore[attr-defined]  # nothing like DLPack has its address
        gradient.data = gradient.clone()


def _end_failed_backward() -> None:
    """Run an empty backward: after an exception in a hook, autograd keeps undelivered gradients until the next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
