"""Refuses optimizers whose step cannot be recorded, before it runs and after it has failed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch

from memplan.errors import UnsupportedGraph
from memplan.trace.optimizer.numbers import Untraceable
from memplan.trace.passes.rewrite import storage_key


def require_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise `UnsupportedGraph` for an optimizer whose step computes the loss several times."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    needed = any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if needed or hasattr(optimizer, "first_step"):
        raise _needs_closure(optimizer, "it computes the loss several times")


def require_apart(optimizer: torch.optim.Optimizer) -> None:
    """Raise `Untraceable` if two tensors of the parameters and the state have memory in common."""
    found: list[tuple[Any, int, int]] = []
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"]}.values()
    entries = [x for state in optimizer.state.values() if isinstance(state, Mapping) for x in state.values()]
    for x in (*parameters, *entries):
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel():
            last = sum((int(size) - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
            start = int(x.storage_offset()) * x.element_size()
            found.append((storage_key(x), start, start + (last + 1) * x.element_size()))
    found.sort(key=lambda one: (str(one[0]), one[1]))
    for (key, _, end), (other, start, _) in itertools.pairwise(found):
        if key == other and start < end:
            raise Untraceable("two tensors of its parameters and its state have memory in common")


def explained(optimizer: torch.optim.Optimizer, error: Exception) -> Exception:
    """Return the error to raise for one of `step()` on fake tensors."""
    words = f"{type(error).__name__}: {error}".splitlines()[0]
    if "closure" in words:
        return _needs_closure(optimizer, words)
    return Untraceable(f"its step() raises on fake tensors: {words}")


def _needs_closure(optimizer: torch.optim.Optimizer, why: str) -> UnsupportedGraph:
    return UnsupportedGraph(
        type(optimizer).__name__,
        f"its step needs a closure: {why}",
        "use memplan.compile for the model, and call the optimizer as before",
        see="closure",
    )
