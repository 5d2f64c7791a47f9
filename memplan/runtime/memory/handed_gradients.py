"""`HandedGradients`: the gradients that wait in autograd for those of other calls of the same backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from memplan.devices.kinds import is_accelerator


class HandedGradients:
    """The gradients of parameters that calls have handed to autograd in the backward that runs.

    Where several calls of a model have one backward, autograd adds up the gradients of each parameter when the last
    call has handed over all of its own. They are not kept alive here. Those on accelerators are not noted: autograd
    orders streams for what is handed to it alone, and not for what is added to that.
    """

    def __init__(self) -> None:
        self._task = -1  # the number of the backward
        self._of: dict[int, weakref.ref[torch.Tensor]] = {}  # by the id of the parameter

    def note(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Note the gradients that a call is about to hand over, the first ones of the parameters, in order."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._of = task, {}
        for p, gradient in zip(parameters, gradients, strict=False):
            known = self._of.get(id(p))
            if gradient is not None and not is_accelerator(p.device) and (known is None or known() is None):
                self._of[id(p)] = weakref.ref(gradient)

    def waiting(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the gradient of each parameter that another call has handed over; None if one has none alive."""
        if not self._of or torch._C._current_graph_task_id() != self._task:
            return None
        found = [gradient for p in parameters if (gradient := self._gradient(p)) is not None]
        return found if len(found) == len(parameters) else None

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        known = self._of.get(id(parameter))
        return None if known is None else known()
