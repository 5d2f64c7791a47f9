"""`gradients="owned"`: the backward gives parameters their `.grad` itself, as autograd's AccumulateGrad would.

One anchor stands for all parameters in the autograd graph, which then has two edges instead of one for each
parameter. What hangs on those edges (hooks, DDP's reducer) would not be called, so its presence raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memplan.errors import UnsupportedCall
from memplan.runtime.guards.hook_counts import hooks_ever_set, hooks_of_node

_HINT = 'compile with gradients="safe"'


class OwnedGradients:
    """Assigns gradients. `anchor` is what autograd sees in the parameters' place.

    `names` are the parameters', `alike` says whose gradient is laid out as the parameter itself.
    """

    def __init__(self, names: Sequence[str], alike: Sequence[bool]) -> None:
        self.anchor = torch.zeros((), requires_grad=True)
        self._names = names
        self._alike = alike
        self._asked: tuple[int, list[int]] = (-1, [])  # hooks ever set, and the parameters, when none had a hook

    def require_no_reducer(self) -> None:
        """Raise inside the forward of DistributedDataParallel, which waits for hooks that would not come."""
        if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise UnsupportedCall(
                'DistributedDataParallel needs the hooks of autograd, which gradients="owned" goes without', hint=_HINT
            )

    def require_no_hooks(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise when one of the parameters has a hook, which would not be called."""
        now = hooks_ever_set(), list(map(id, parameters))  # an id that is another's by now: its hook was set since
        for i, p in enumerate(parameters):
            if p._backward_hooks or p._post_accumulate_grad_hooks or (now != self._asked and hooks_of_node(p)):
                raise UnsupportedCall(
                    'has a hook, which gradients="owned" would not call', where=self._names[i], hint=_HINT
                )
        self._asked = now

    def assign(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Make each gradient its parameter's `.grad`, or add it to the one that is there."""
        for p, gradient, alike in zip(parameters, gradients, self._alike, strict=True):
            if gradient is None:
                continue
            grad = p.grad
            if grad is not None:
                grad.add_(gradient)
            elif alike:
                p.grad = gradient
            else:
                p.grad = torch.empty_like(p).copy_(gradient)
