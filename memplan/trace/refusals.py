"""Models that no front end can read rightly: refused before anything is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memplan.errors import UnsupportedGraph


def require_traceable(model: Any) -> None:
    """Raise `UnsupportedGraph` for what is no module, and for modules whose call is not their forward on tensors."""
    if not isinstance(model, nn.Module):
        raise UnsupportedGraph(type(model).__name__, "is not an nn.Module", "pass the model itself, then its inputs")
    for name, module in model.named_modules():
        found = _refusal(module)
        if found is not None:
            reason, hint = found
            raise UnsupportedGraph(type(model).__name__, f"{name or 'the model'} {reason}", hint)


def _refusal(module: nn.Module) -> tuple[str, str] | None:
    """Why a module cannot be traced, and what to do; None when it can."""
    if isinstance(module, torch.jit.ScriptModule):  # no Python is left, and parameters are not where a module's are
        return "is a ScriptModule, which cannot be traced", "pass the module as it was before torch.jit.script or trace"
    if module._backward_hooks or module._backward_pre_hooks:  # they run where autograd passes a module's border
        reason = "has backward hooks, which a compiled step would not call"
        return reason, "remove them, or use hooks on parameters or outputs"
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    if any(map(is_lazy, held)):
        return "has parameters whose shapes are not known yet", "call the model once on its inputs, then compile it"
    return None
