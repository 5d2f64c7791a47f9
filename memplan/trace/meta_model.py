"""Copies of models and inputs on the meta device, in another type or for another batch: sizes without bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memplan.errors import InvalidModel, InvalidSize


def meta_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a model on the meta device; `dtype` replaces the type of its floating-point tensors.

    The copy holds no bytes. Tensors that several modules share stay shared. Raises `InvalidModel` for a model that
    cannot be copied.
    """

    def meta(t: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `t` on the meta device."""
        made = torch.empty_like(t, device="meta", dtype=_as(t, dtype))
        return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made

    try:
        return copied_with(model, meta)
    except Exception as error:
        what = f"cannot be copied to another type: {type(error).__name__}: {error}".splitlines()[0]
        hint = "pass a function from a batch size to (model, inputs) that makes it in that type"
        raise InvalidModel(what, where=type(model).__name__, hint=hint) from error


def copied_with(model: nn.Module, made: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy of a model with `made(t)` in place of each parameter and buffer; what is shared stays shared."""
    memo: dict[int, Any] = {id(t): made(t) for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def meta_inputs(inputs: Any, *, batch: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """Return inputs on the meta device, for another size of the batch, their first dimension, and another type.

    Raises `InvalidSize` where `batch` is given and the tensors have no first dimension in common.
    """
    own = batch_of(inputs)
    if batch is not None and own is None:
        what = "the example's tensors have no first dimension in common that could be the batch"
        hint = "give the factory an argument named batch: def factory(batch=8): return model, inputs"
        raise InvalidSize(what, where="batch", hint=hint)

    def meta(t: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `t`, for the batch, on the meta device."""
        kind = _as(t, dtype)
        if batch is None or batch == own or not t.ndim:
            return torch.empty_like(t, device="meta", dtype=kind).requires_grad_(t.requires_grad)
        return torch.empty((batch, *t.shape[1:]), device="meta", dtype=kind).requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, meta, inputs)


def batch_of(inputs: Any) -> int | None:
    """Return the size of the first dimension that all tensors of the inputs have in common; None if there is none."""
    sizes = {leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def _as(t: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and t.is_floating_point() else t.dtype


def floating_type(name: str | torch.dtype) -> torch.dtype:
    """Return a floating-point type, or that of a name such as "bfloat16". Raises `InvalidSize` for anything else."""
    found = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        hint = "choose one of: float32, bfloat16, float16"
        raise InvalidSize(f"{name!r} is no floating-point type of torch", where="dtype", hint=hint)
    return found
