"""`gradients="arena"`: parameters' gradients stay where the plan has them, until the next step needs the bytes.

Freed activations leave room for them, so that a step takes no more than its own peak; outside the arena, they would
come on top of it. What is still there when the next program begins (`.grad` that nobody has set to None) moves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memplan.errors import StaleActivationsError
from memplan.runtime.arena import Arena
from memplan.runtime.slots import Slots

_HINT = 'drop it before the next step, keep a copy of it, or compile with gradients="safe"'


class ResidentGradients:
    """The gradients of one program that lie in the arena between its steps.

    `slots` (positions in `held`) are their parameters, `tensors` the addresses. Whatever refers to one of them keeps
    the whole arena alive.
    """

    def __init__(self, held: Slots, slots: Sequence[int], tensors: Sequence[torch.Tensor], arena: Arena) -> None:
        pairs = [(slot, t.untyped_storage()) for slot, t in zip(slots, tensors, strict=True) if t.numel()]
        self._held = held
        self._slots = [slot for slot, _ in pairs]
        self._storages = [storage for _, storage in pairs]
        for storage in self._storages:
            storage.arena = arena.memory  # type: ignore[attr-defined]  # torch keeps this as long as the storage
        self._handles = [storage._cdata for storage in self._storages]
        self._nobody = self._references()

    def _references(self) -> list[int]:
        return list(map(torch._C._storage_Use_Count, self._handles))

    def move_out(self) -> None:
        """Give each `.grad` that lies here memory of its own.

        Raises `StaleActivationsError` where something else refers to a gradient: it would be overwritten.
        """
        if self._references() == self._nobody:
            return
        here = {storage.data_ptr() for storage in self._storages}
        with torch.no_grad():
            for gradient in (p.grad for p in self._held.tensors()):
                if gradient is not None and gradient.untyped_storage().data_ptr() in here:
                    gradient.data = gradient.clone()
        for slot, now, free in zip(self._slots, self._references(), self._nobody, strict=True):
            if now != free:
                raise StaleActivationsError(
                    f"the gradient of {self._held.names[slot]!r} is still referred to by something else than its "
                    "parameter's .grad, and this step would overwrite it",
                    hint=_HINT,
                )
