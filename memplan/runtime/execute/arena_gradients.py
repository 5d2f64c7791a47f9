"""`gradients="arena"`: keeps the gradients of parameters in the arena until the next step needs the bytes.

They use the bytes of freed activations, so that a step takes no more than its own peak; outside the arena, they would
add to it. A `.grad` that is still set when the next program begins is moved out of the arena.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from memplan.errors import StaleActivationsError
from memplan.runtime.guards.parameter_guards import ParameterGuards
from memplan.runtime.memory.arena import Arena

_ALONE = 2  # references to the tensor of a `.grad` if only its parameter and its Python object refer to it


class ArenaGradients:
    """The gradients of one program that are in the arena between its steps.

    `slots` (positions in `held`) are their parameters, `tensors` their places. A reference to one of them keeps the
    whole arena alive.
    """

    def __init__(
        self, held: ParameterGuards, slots: Sequence[int], tensors: Sequence[torch.Tensor], arena: Arena
    ) -> None:
        self._held = held
        self._slots = [slot for slot, t in zip(slots, tensors, strict=True) if t.numel()]
        self._storages = [t.untyped_storage() for t in tensors if t.numel()]
        self._addresses = [storage._cdata for storage in self._storages]
        self._keep(arena)
        self._unreferenced = self._references()

    def _keep(self, arena: Arena) -> None:
        for storage in self._storages:
            storage.arena = arena.memory  # type: ignore[attr-defined]  # torch keeps this attribute as long as the storage exists

    def _references(self) -> list[int]:
        """Return for each storage the number of tensors that use it, and of references to its Python object."""
        return [*map(torch._C._storage_Use_Count, self._addresses), *map(sys.getrefcount, self._storages)]

    def move_out(self) -> None:
        """Move each `.grad` that is in the arena to memory of its own.

        Raises `StaleActivationsError` if anything else refers to a gradient, which would be overwritten.
        """
        if self._references() == self._unreferenced:
            return
        here = {storage.data_ptr() for storage in self._storages}
        with torch.inference_mode(False), torch.no_grad():
            for parameter in self._held.tensors():
                _move(parameter, here)
        if self._references() == self._unreferenced:
            return
        _end_failed_backward()
        now, free = self._references(), self._unreferenced
        both = [*self._slots, *self._slots]
        slot = next((slot for slot, one, two in zip(both, now, free, strict=True) if one != two), None)
        if slot is not None:
            raise _referred(self._held.names[slot])


def _move(parameter: torch.Tensor, here: set[int]) -> None:
    """Move `.grad` out of the arena; it stays the same tensor object, unless it is a view."""
    gradient = parameter.grad
    if gradient is None or gradient.untyped_storage().data_ptr() not in here:
        return
    if gradient._is_view():
        parameter.grad = gradient.clone()
    elif gradient._use_count() <= _ALONE:  # type: ignore[attr-defined]  # otherwise something like DLPack has its address
        gradient.data = gradient.clone()


def _end_failed_backward() -> None:
    """Run an empty backward: after an exception in a hook, autograd keeps undelivered gradients until the next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def _referred(name: str) -> StaleActivationsError:
    return StaleActivationsError(
        f"the gradient of {name!r} is still referred to by something else than its parameter's .grad (a view, an "
        "array, a result of autograd.grad, another name), and this step would overwrite it",
        hint='drop that before the next step, keep a copy of it, or compile with gradients="safe"',
        see="gradient-kept",
    )
