"""`gradients="owned"`: the backward assigns `.grad` of parameters itself, as autograd's AccumulateGrad does.

One anchor replaces all parameters in the autograd graph, which then has two edges instead of one for each parameter.
Hooks on the nodes of parameters, and DDP's reducer, would not be called, so they raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memplan.errors import UnsupportedCall
from memplan.runtime.guards.hook_counts import HookSearch
from memplan.runtime.guards.ranks import in_ddp

_HINT = 'compile with gradients="safe"'


class OwnedGradients:
    """Assigns the gradients of parameters. `anchor` is the tensor that autograd sees instead of them.

    `names` are the names of the parameters; `same_strides` says which gradients have the layout of their parameter.
    """

    def __init__(self, names: Sequence[str], same_strides: Sequence[bool]) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self._names = names
        self._same_strides = same_strides
        self._hooks = HookSearch()

    def require_no_reducer(self) -> None:
        """Raise `UnsupportedCall` inside the forward of DistributedDataParallel, whose hooks would not be called."""
        if in_ddp():
            raise UnsupportedCall(
                'DistributedDataParallel needs the hooks of autograd, which gradients="owned" does not call',
                hint=_HINT,
                see="gradients-owned",
            )

    def require_no_hooks(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise `UnsupportedCall` if one of the parameters has a hook, which would not be called."""
        found = self._hooks.first(parameters)
        if found is not None:
            raise UnsupportedCall(
                'has a hook, which gradients="owned" would not call',
                where=self._names[found],
                hint=_HINT,
                see="gradients-owned",
            )

    def assign(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the `.grad` of each parameter, or add the gradient to an existing one."""
        for p, gradient, same_strides in zip(parameters, gradients, self._same_strides, strict=True):
            if gradient is None:
                continue
            grad = p.grad
            if grad is not None:
                grad.add_(gradient)
            elif same_strides:
                p.grad = gradient
            else:
                p.grad = torch.empty_like(p).copy_(gradient)
