"""Copies and pickles compiled modules: the model is copied, and compiled again from the same example when it is used.

A compiled module consists of addresses in its arena, which mean nothing elsewhere. The original, the example inputs and
the options can be copied; a copy has parameters, a plan and an arena of its own. A copy that is never used has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from memplan.core.plan import Plan
from memplan.errors import UnsupportedCall
from memplan.runtime.api.example_leaves import detached
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import CompileOptions

Example = tuple[tuple[Any, ...], dict[str, Any]]
_Recipe = tuple[nn.Module, Example, Mapping[str, Any]]


def recipe(  # noqa: PLR0917
    model: nn.Module,
    main: Runner,
    options: CompileOptions,
    given: Plan | None,
    modes: Mapping[str, bool],
    train: bool | None,
) -> _Recipe:
    """Return the model, the example and the settings with which a module is compiled again.

    `modes`: the training flags of submodules, by name, when the model was compiled.
    """
    traced = main.traced
    if traced.autocast is not None:
        raise UnsupportedCall(
            "a module compiled under autocast cannot be copied or pickled",
            where=type(model).__name__,
            hint="copy or save the original model (its state_dict is this one's), then compile the copy",
            see="autocast-copy",
        )
    return model, example_of(main), {"options": options, "train": train, "given": given, "copied_in": modes}


def example_of(runner: Runner) -> Example:
    """Return the arguments that a program was traced with; a `TensorLike` stands for each tensor that is not kept."""
    example: Example = pytree.tree_unflatten([detached(x) for x in runner.example], runner.traced.in_spec)
    return example


def rebuild(
    make: Callable[..., nn.Module],
    model: nn.Module,
    example: Example,
    settings: Mapping[str, Any],
    modes: list[bool] | None = None,
) -> nn.Module:
    """Return `make(model, *example, **settings)`, which compiles the model when it is first used.

    `modes`: the training flags in pickles of older versions, whose settings have none.
    """
    if modes is not None:
        settings = {**settings, "copied_in": modes}
    return make(model, *example, **settings)


def modes_by_name(model: nn.Module, modules: Sequence[nn.Module], modes: Sequence[bool]) -> dict[str, bool]:
    """Return the training flags of modules by their names in a model, without those that it does not have."""
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(m)]: training for m, training in zip(modules, modes, strict=True) if id(m) in names}


@contextmanager
def in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """Give the submodules of a model these training flags, by name, and reset them afterwards.

    Submodules that were added since keep their own.
    """
    modules = dict(model.named_modules())
    before = {name: module.training for name, module in modules.items()}
    _set_modes(modules, {**before, **modes})
    try:
        yield
    finally:
        _set_modes(modules, before)


def _set_modes(modules: Mapping[str, nn.Module], modes: Mapping[str, bool]) -> None:
    for name, module in modules.items():
        module.training = modes[name]
