"""Lists torch callables that may run a kernel from Python, and their arguments, as candidates for the trial run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.core.graph import Graph
from memplan.runtime.memory.arena import dtype_of
from memplan.trace.traced import KernelCall

Function = Callable[..., Any]
_METHODS = {
    *("copy_", "fill_", "zero_", "mul_", "add_", "sub_", "div_", "masked_fill_", "bernoulli_", "index_add_"),
    "index_put_",
}
# Functions that lowering rules and optimizers call; the dispatcher takes twice as long to parse their arguments.
_FUNCTIONS = {
    *("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_foreach_add_", "_foreach_zero_", "index_select", "arange"),
}
_ARITHMETIC = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")


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


def scalars_as_tensors(kernel: KernelCall, graph: Graph) -> tuple[Any, ...]:
    """Return the arguments with a number as second operand replaced by the tensor that each call would make of it."""
    args = kernel.args
    if kernel.target._opname not in _ARITHMETIC or kernel.target._overloadname != "Tensor":
        return args
    result = graph.values[kernel.outs[0] if kernel.outs and kernel.outs[0] is not None else args[0].value]
    kinds = {"float32": (int, float), "float64": (int, float), "int64": (int,)}
    if type(args[1]) not in kinds.get(result.dtype, ()):
        return args
    return args[0], torch.tensor(args[1], dtype=dtype_of(result)), *args[2:]


def fast_bindings(kernel: KernelCall) -> tuple[Function, ...]:
    """Return Python bindings that avoid the dispatcher's boxed argument parsing; they may call another overload."""
    name = kernel.target._opname
    spaces = (torch._C._VariableFunctions, torch._C._nn)
    return tuple(getattr(space, name) for space in spaces if hasattr(space, name))
