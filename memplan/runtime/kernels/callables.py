"""Lists torch callables that may run a kernel from Python, and their arguments, as candidates for the trial run.

`with_state` runs a kernel with a saved state of the CPU's random generator. `layer_function` runs oneDNN's LSTM, which
returns a workspace for its backward only while gradients are enabled: autograd disables them in a compiled forward, and
an inference program may run with them enabled, so that it sets the mode itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def fast_bindings(kernel: KernelCall) -> tuple[Function, ...]:
    """Return Python bindings that avoid the dispatcher's boxed argument parsing; they may call another overload."""
    name = kernel.target._opname
    spaces = (torch._C._VariableFunctions, torch._C._nn)
    return tuple(getattr(space, name) for space in spaces if hasattr(space, name))


def save_state(place: torch.Tensor) -> None:
    """Write the state of the generator into `place`: uint8, as many elements as `torch.get_rng_state()` has."""
    place.copy_(torch.default_generator.get_state())


def with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a saved state before the arguments of `function`, and draws with it.

    The generator has the same state afterwards as before.
    """
    generator = torch.default_generator

    def drawing_again(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = generator.get_state()
        generator.set_state(state)
        try:
            return function(*args, **kwargs)
        finally:
            generator.set_state(now)

    return drawing_again


_LAYER = torch.ops.aten.mkldnn_rnn_layer.default._op


def layer_function(*, workspace: bool) -> Callable[..., Any]:
    """Return the function that runs `aten.mkldnn_rnn_layer`, with a workspace as its last result or with None."""
    return _with_workspace if workspace else _without_workspace


def _with_workspace(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch.enable_grad():
        return _LAYER(*args)


def _without_workspace(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch.no_grad():
        return _LAYER(*args)
