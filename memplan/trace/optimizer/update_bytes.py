"""Measures what an optimizer keeps and allocates, from meta tensors: the bytes of its state, and the peak of `step()`.

The optimizer's own code runs, so every optimizer of `torch.optim`, and others, are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memplan.errors import InvalidModel
from memplan.trace.allocations import Allocations, storage_of

Parameters = Iterable[torch.nn.Parameter]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
NONE = "none"
_NUMBER = 8  # bytes: torch makes a tensor of the host of a Python number while an op of the update reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBytes:
    """The needs of an optimizer on the device of its parameters.

    `name` is its class, `state` the bytes that it keeps, `temporaries` the most that `step()` allocates beside them.
    """

    name: str
    state: int
    temporaries: int


def update_bytes(
    optimizer: str | MakeOptimizer, parameters: Parameters, *, foreach: bool, counters: bool = False
) -> UpdateBytes:
    """Return what an optimizer needs for parameters that require gradients.

    Args:
        optimizer: The name of a class in `torch.optim`, "none", or a function from parameters to an optimizer.
        parameters: The parameters, of any device.
        foreach: Update all parameters together where the class can and nothing else is asked for, as torch does on
            accelerators.
        counters: Count what is on the host too: the number of steps of each parameter, and a number in an update.

    Raises:
        InvalidModel: There is no such optimizer, or it cannot update these parameters.
    """
    own = [_with_gradient(p) for p in parameters if p.requires_grad]
    if optimizer == NONE or not own:
        return UpdateBytes(name=NONE, state=0, temporaries=0)
    made = _made(optimizer, own)
    if foreach:
        for group in made.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
    counted = Allocations(storage_of(p)[0] for one in own for p in (one, one.grad) if p is not None)
    try:
        with counted, torch.no_grad():
            made.step()
    except Exception as error:
        raise _failed(made, error) from error
    state = _bytes_of(made.state.values(), counters=False)
    temporaries = max(counted.peak - state, 0)
    if counters:
        state, temporaries = _bytes_of(made.state.values(), counters=True), temporaries + _NUMBER
    return UpdateBytes(name=type(made).__name__, state=state, temporaries=temporaries)


def _with_gradient(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a copy of a parameter, and of its gradient, on the meta device."""
    made = torch.nn.Parameter(torch.empty_like(p, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def _made(optimizer: str | MakeOptimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer. Raises `InvalidModel`."""
    make: Any = optimizer
    if isinstance(optimizer, str):
        classes = _classes()
        make = classes.get(optimizer.lower())
        if make is None:
            hint = f"choose one of: {', '.join(cls.__name__ for cls in classes.values())}, or {NONE}"
            raise InvalidModel(f"torch.optim has no {optimizer!r}", where="optimizer", hint=hint)
    try:
        made = make(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"returned an object of type {type(made).__name__}, which is no torch.optim.Optimizer")
    except Exception as error:
        raise _failed(make, error) from error
    return made


def _classes() -> Mapping[str, Any]:
    """Return the optimizers of torch by their names in lower case."""
    found = (value for value in vars(torch.optim).values() if isinstance(value, type))
    own = (value for value in found if issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer)
    return {value.__name__.lower(): value for value in own}


def _failed(optimizer: Any, error: Exception) -> InvalidModel:
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    hint = "name another optimizer, 'none', or pass a function that makes it: lambda parameters: AdamW(parameters)"
    return InvalidModel(f"{name} cannot update these parameters: {first}", where="optimizer", hint=hint)


def _bytes_of(states: Iterable[Mapping[str, Any]], *, counters: bool) -> int:
    """Return the bytes of the tensors in the state, with or without the counters that stay on the host."""
    leaves = (leaf for state in states for leaf in tree_leaves(dict(state)) if isinstance(leaf, torch.Tensor))
    return sum(dict(storage_of(leaf) for leaf in leaves if counters or leaf.is_meta).values())
