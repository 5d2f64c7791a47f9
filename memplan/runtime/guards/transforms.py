"""Refuses calls inside transforms (`torch.func`, forward-mode derivatives), which cannot transform a planned step.

Kernels that write to planned addresses have no batching rules and no tangents: results would be wrong, or zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import forward_ad

from memplan.errors import UnsupportedCall

active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def around() -> bool:
    """Return whether a transform may be active around this call. It costs one C call."""
    return active() or forward_ad._current_level >= 0


def refusal(arguments: Any, model: nn.Module) -> UnsupportedCall | None:
    """Return the error for a call of `model` with these arguments; None if no transform applies to them."""
    hint = 'call the original model there; memplan.compile(..., on_mismatch="eager") does'
    if active():
        what = "a planned step cannot run inside torch.func's transforms (grad, vmap, jvp, jacrev, ...)"
        return UnsupportedCall(what, where="the call", hint=hint, see="transforms")
    tensors = [*pytree.tree_leaves(arguments), *model.parameters(), *model.buffers()]
    if any(isinstance(x, torch.Tensor) and _is_dual(x) for x in tensors):
        what = "a planned step has no forward-mode derivative, and one of its tensors is dual"
        return UnsupportedCall(what, where="the call", hint=hint, see="transforms")
    return None


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def refuse(arguments: Any, model: nn.Module) -> None:
    """Raise `UnsupportedCall` if a transform applies to this call."""
    if around() and (refused := refusal(arguments, model)):
        raise refused
