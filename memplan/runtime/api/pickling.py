"""Copies of a compiled module: the model is copied or pickled, then compiled again from the same example.

A compiled module is addresses in its arena, which mean nothing elsewhere. What made it does: the original, the
example inputs and the options; a copy has parameters, a plan and an arena of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memplan.core.plan import Plan
from memplan.errors import UnsupportedCall
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import Options

_Example = tuple[tuple[Any, ...], dict[str, Any]]
_Recipe = tuple[nn.Module, _Example, Mapping[str, Any], list[bool]]


def recipe(  # noqa: PLR0917
    model: nn.Module, main: Runner, options: Options, given: Plan | None, modes: list[bool], train: bool | None
) -> _Recipe:
    """The arguments of `rebuild`. `modes`: the training flag of every submodule when the model was compiled."""
    traced = main.traced
    if traced.autocast is not None:
        raise UnsupportedCall(
            "a module compiled under autocast cannot be copied or pickled",
            where=type(model).__name__,
            hint="copy or save the original model (its state_dict is this one's), then compile the copy",
        )
    examples = [detached(x) for x in traced.example_inputs]
    example = pytree.tree_unflatten(examples, traced.in_spec)
    return model, example, {"options": options, "train": train, "given": given}, modes


def rebuild(
    make: Callable[..., nn.Module],
    model: nn.Module,
    example: _Example,
    settings: Mapping[str, Any],
    modes: list[bool],
) -> nn.Module:
    """`make(model, *example, **settings)` in the modes of the first time; the model's own are kept."""
    modules = list(model.modules())
    before = [m.training for m in modules]
    _set(modules, modes)
    try:
        return make(model, *example, **settings)
    finally:
        _set(modules, before)


def _set(modules: list[nn.Module], modes: list[bool]) -> None:
    for module, training in zip(modules, modes, strict=True):
        module.training = training


def detached(x: Any) -> Any:
    """A leaf of a call apart from what made it; what is no tensor, as it is."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
