"""Checks on every call that torch's objects for many ranks are as a compiled step needs them."""

from __future__ import annotations

from typing import Any

from torch import nn

from memplan.distributed.internals import groups_of
from memplan.distributed.parallelism import fsdp_modules, reducer_of
from memplan.distributed.refusals import require_group, require_reducer_options
from memplan.errors import UnsupportedCall


class ParallelGuards:
    """The states of a model's sharded modules, and of its `DistributedDataParallel`."""

    def __init__(self, model: nn.Module) -> None:
        self._reducer: Any = reducer_of(model)
        self._copies_buffers = self._reducer is not None and self._reducer.broadcast_buffers
        self._groups = [
            (module, module._get_fsdp_state(), group)  # type: ignore[operator]
            for module in fsdp_modules(model)
            for group in groups_of(module._get_fsdp_state())  # type: ignore[operator]
        ]

    def check(self) -> None:
        """Free whole parameters that an eager forward has left, which a step would not update.

        Raises:
            UnsupportedCall: Gradients shall not be reduced, which a compiled step always does.
            UnsupportedGraph: An option was set after compiling that a compiled step does not follow.
        """
        for module, state, group in self._groups:
            if group.is_unsharded:
                _reshard(module)
            if not group.reduce_grads:
                self._refuse("set_requires_gradient_sync(False)")
            require_group(module, state, group)
        if self._reducer is None:
            return
        if not self._reducer.require_backward_grad_sync:
            self._refuse("no_sync()")
        require_reducer_options(self._reducer)
        if self._reducer.broadcast_buffers != self._copies_buffers:
            what = "broadcast_buffers is not what it was when the step was compiled"
            raise UnsupportedCall(what, hint="compile the step again", see="ranks-refused")

    def _refuse(self, what: str) -> None:
        hint = "call the step outside of it, and pass accumulate= to compile_step to add gradients of several batches"
        what = f"a compiled step reduces its gradients, also under {what}"
        raise UnsupportedCall(what, hint=hint, see="ranks-refused")


def _reshard(module: Any) -> None:
    module.reshard()
