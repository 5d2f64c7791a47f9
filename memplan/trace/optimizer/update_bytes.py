"""Measures what an optimizer keeps and allocates, from meta tensors: the bytes of its state, and the peak of `step()`.

The optimizer's own code runs, so every optimizer of `torch.optim`, and others, are measured alike.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memplan.errors import InvalidModel
from memplan.trace.allocations import Allocations, storage_of
from memplan.trace.optimizer.fake_copy import foreach_by_default
from memplan.trace.optimizer.surroundings import OWN, is_hooks

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


def bytes_of_step(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the most bytes that the next `step()` of an optimizer allocates beside its state; None if it is not known.

    A copy of one of torch's own optimizers runs on meta tensors, twice, as the first step makes state. Others are not
    run: a copy of them may hold, and then update, something of the original.

    Args:
        optimizer: The optimizer; parameters without a gradient are not updated, as in `step()`.

    Returns:
        The bytes, on the device of the parameters.

    Example:
        >>> bytes_of_step(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        0
    """
    if type(optimizer) not in _classes().values() or isinstance(optimizer, torch.optim.LBFGS):
        return None
    try:
        made = _meta_copy(optimizer)
        step: Any = type(made).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of all optimizers
        with Allocations(()) as counted, torch.no_grad():
            step(made)
            before = counted.peak = counted.live
            step(made)
    except Exception:  # whatever an update does with tensors that have no numbers, the real one runs as ever
        return None
    return int(counted.peak - before)


def _meta_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of an optimizer without state, hooks and what others have attached to it, on meta parameters."""
    made: Any = object.__new__(type(optimizer))
    own = {key: value for key, value in vars(optimizer).items() if key not in OWN}
    made.__dict__.update({key: type(value)() if is_hooks(key) else copy.copy(value) for key, value in own.items()})
    made.defaults, made.state = dict(optimizer.defaults), defaultdict(dict)
    made.param_groups = []
    for group in optimizer.param_groups:
        if group.get("fused"):  # its kernel allocates nothing
            continue
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        if "foreach" in options and options["foreach"] is None:
            options["foreach"] = foreach_by_default(group)
        updated = [p for p in group["params"] if p.grad is not None]
        made.param_groups.append({**options, "params": [_with_gradient(p) for p in updated]})
    return made  # type: ignore[no-any-return]


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
