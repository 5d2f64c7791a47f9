"""Lists torch callables that may run a kernel from Python, and their arguments, as candidates for the trial run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.core.graph import Graph
from memplan.trace.traced import KernelCall, number_operand

Function = Callable[..., Any]
_METHODS = {
    *("copy_", "fill_", "zero_", "mul_", "add_", "sub_", "div_", "masked_fill_", "bernoulli_", "index_add_"),
    "index_put_",
}
# Functions that lowering rules and optimizers call; the dispatcher takes twice as long to parse their arguments.
_FUNCTIONS = {
    *("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_foreach_add_", "_foreach_zero_", "index_select", "arange"),
}


def in_place_function(kernel: KernelCall) -> Function:
    """Return the callable of a mutating op: a method such as `Tensor.copy_` if there is one, else the dispatcher's."""
    name = kernel.target._opname
    whole = name == "index_put_" and None in kernel.args[1]  # some dimensions are not indexed: methods take no None
    if name in _METHODS and not kernel.kwargs and not whole:
        method: Function = getattr(torch.Tensor, name)
        return method
    if name in _FUNCTIONS:
        function: Function = getattr(torch._C._VariableFunctions, name)
        return function
    overload: Function = kernel.target._op
    return overload


def scalars_as_tensors(kernel: KernelCall, graph: Graph, made: MutableMapping[Any, torch.Tensor]) -> tuple[Any, ...]:
    """Return the arguments with a number as second operand replaced by the tensor that each call would make of it.

    `made`: the tensors of earlier calls, to be used again for the same numbers; nothing writes to them.
    """
    key = number_operand(kernel, graph)
    if key is None:
        return kernel.args
    args = kernel.args
    number = made.get(key)
    if number is None:
        number = made[key] = torch.tensor(args[1], dtype=getattr(torch, key[1]))
    return args[0], number, *args[2:]


def bytes_of_numbers(arguments: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of the tensors among the arguments of calls that are in the memory of `device`, each once."""
    leaves = (leaf for leaf in tensors_among(arguments) if leaf.device.type == device.type)
    return sum({leaf.data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}.values())


def tensors_among(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of calls."""
    return [leaf for leaf in pytree.tree_leaves(list(arguments)) if isinstance(leaf, torch.Tensor)]


def fast_bindings(kernel: KernelCall) -> tuple[Function, ...]:
    """Return Python bindings that avoid the dispatcher's boxed argument parsing; they may call another overload."""
    name = kernel.target._opname
    spaces = (torch._C._VariableFunctions, torch._C._nn)
    return tuple(getattr(space, name) for space in spaces if hasattr(space, name))
