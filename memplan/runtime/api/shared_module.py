"""`SharedModule`: a module that stands for another one, whose parameters, buffers and attributes are its own too.

Trainers look at the signature of `forward` and the name of the class to know which columns of a data set a model takes,
and which of them are labels. Each compiled module has a class of its own, which shows the original's, and nothing else:
`isinstance` tells a compiled module from what it was compiled from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Self, TypeVar

from torch import nn

_M = TypeVar("_M", bound=nn.Module)


class SharedModule(nn.Module):
    """A module that shares the parameters, buffers and submodules of another one under the same names.

    It is trained and saved like the original: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters
    work on both. Attributes that are not its own are the original's. Its class shows the original's signature and name.
    """

    def __init__(self, original: nn.Module) -> None:
        self.__dict__["_original"] = original
        mode = original.training
        super().__init__()
        self.__class__ = shown_as(type(self), original)  # for libraries that read its signature and its class
        original.training = mode
        # without nn.Module.__setattr__: the model may have a submodule of any name
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = original.__dict__[name]

    @property
    def training(self) -> bool:
        """The training flag of the original."""
        return bool(self._original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the flag of the original alone, without its submodules (Lightning sets each one itself)."""
        self._original.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the training flag of the original and its submodules.

        Args:
            mode: True to train, False to evaluate.

        Returns:
            This module.

        Example:
            ```python
            compiled.train()
            ```
        """
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict` of the original, whose hooks and extra state apply.

        Args:
            args: Those of `torch.nn.Module.state_dict`.
            kwargs: Those of `torch.nn.Module.state_dict`.

        Returns:
            The parameters and buffers, by the original's names.

        Example:
            ```python
            torch.save(compiled.state_dict(), "model.pt")
            ```
        """
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` into the original, which shares its parameters with this module.

        Args:
            args: Those of `torch.nn.Module.load_state_dict`.
            kwargs: Those of `torch.nn.Module.load_state_dict`.

        Returns:
            The missing and the unexpected keys.

        Example:
            ```python
            compiled.load_state_dict(torch.load("model.pt"))
            ```
        """
        return self._original.load_state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the original, whose forward is traced, unless it is this module's own."""
        own = name in self.__dict__ or hasattr(type(self), name)
        (super().__setattr__ if own else self._original.__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        (super() if name in self.__dict__ else self._original).__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


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
