"""Models that cannot be traced: what no front end can read rightly, refused before; and what one complained of."""

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


def unsupported(model: nn.Module, error: Exception) -> UnsupportedGraph:
    """The front end's complaint as one sentence and a next step."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"cannot be traced as one graph: {type(error).__name__}: {lines[0] if lines else 'no message'}"
    details = [line for line in lines[1:] if line.startswith(("Explanation:", "from user code", "File ", "Hint:"))]
    text = " ".join(lines).lower()
    if any(
        word in text for word in ("data-dependent", "unbacked", "guardondatadependent", "dynamicoutputshape", ".item()")
    ):
        hint = (
            "shapes or branches depend on tensor values; compute them outside the model or use a static variant "
            '(for mixtures of experts in transformers: model.set_experts_implementation("batched_mm"))'
        )
    elif "entirely functional graph" in text:
        hint = "register the tensor that forward changes in place as a buffer of the model"
    elif "not a known type" in text or "unhashable type" in text or "pytree-flattenable" in text:
        hint = "take and return tensors, tuples, lists or dicts, or register the type (torch.export.register_dataclass)"
        if "cache" in text:
            hint = "set model.config.use_cache = False, which training needs not (transformers)"
    elif "graph break" in text or "unsupported" in text:
        hint = (
            "remove what breaks the graph from forward (print, logging, .item(), calls into C), or compute it outside"
        )
    else:
        hint = "check that model(*example_inputs) runs eagerly; then trace a smaller submodule to find the culprit"
    return UnsupportedGraph(type(model).__name__, "\n  ".join([reason, *details[:4]]), hint)
