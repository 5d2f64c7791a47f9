"""The class of a compiled module, for libraries that read a model's signature and the name of its class.

Trainers look at both to know which columns of a data set a model takes, and which of them are labels. Each compiled
module has a class of its own, which shows them the original's, and nothing else: `isinstance` tells a compiled module
from what it was compiled from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


def shown_as(base: type[_M], model: nn.Module) -> type[_M]:
    """Return a subclass of `base` with the class name of `model`, whose `forward` shows the signature of `model`.

    Args:
        base: The class of the compiled module, whose `forward` takes any arguments.
        model: The original.

    Returns:
        The subclass, which adds nothing else; `base` itself where the original has no signature.

    Example:
        >>> compiled = memplan.compile(nn.Linear(8, 8), torch.randn(4, 8))
        >>> type(compiled).__name__, inspect.signature(compiled.forward)
        ('Linear', <Signature (input: torch.Tensor) -> torch.Tensor>)
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return base
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown = signature.replace(parameters=[itself, *signature.parameters.values()])
    body = {
        "forward": _showing(base.forward, shown),
        "_get_name": lambda _: base.__name__,  # of `repr`
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(type(model).__name__, (base,), body)


def _showing(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Return a copy of a function that shows another signature; calling it costs no further call."""
    assert isinstance(function, FunctionType)
    code, names = function.__code__, function.__globals__
    shown = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    shown.__kwdefaults__, shown.__doc__ = function.__kwdefaults__, function.__doc__
    shown.__signature__ = signature  # type: ignore[attr-defined]
    return shown
