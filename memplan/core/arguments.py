"""Checks of what is given: example inputs as the arguments of a call, kinds of arguments, libraries that are extras."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from memplan.errors import LibraryNotInstalled, MemplanError, TorchNotInstalled

LOAD = "make one by memplan.plan(model, example_inputs), or read it by memplan.load(path)"


def arguments_of(example_inputs: Any, example_kwargs: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of the call that an example describes.

    A tuple is the positional arguments. A dict is the keywords, unless `example_kwargs` gives them. Anything else, a
    list too, is the only argument.

    Raises:
        MemplanError: The keywords are no dict with names as keys, such as a second input beside the first.

    Example:
        >>> arguments_of(1), arguments_of((1, 2)), arguments_of({"x": 1}), arguments_of([1, 2], {"scale": 2.0})
        (((1,), {}), ((1, 2), {}), ((), {'x': 1}), (([1, 2],), {'scale': 2.0}))
    """
    if isinstance(example_inputs, Mapping) and example_kwargs is None:
        return (), _keywords(example_inputs, "example_inputs", "pass a dict that is an argument itself as ({...},)")
    hint = "pass several example inputs as a tuple: (model, (first, second))"
    keywords = {} if example_kwargs is None else _keywords(example_kwargs, "example_kwargs", hint)
    return example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), keywords


def require_kind(value: object, kind: type, where: str, hint: str) -> None:
    """Raise `MemplanError` unless a value is of a kind; `hint` says how to give one.

    Example:
        >>> require_kind(plan, Plan, "explain", "load a file first: memplan.load(path)")
    """
    if not isinstance(value, kind):
        raise MemplanError(f"is given a {type(value).__name__}, not a {kind.__name__}", where=where, hint=hint)


def _keywords(given: Any, where: str, hint: str) -> dict[str, Any]:
    """Return keywords as a dict. Raises `MemplanError` unless they are a mapping with names as keys."""
    if not isinstance(given, Mapping):
        raise MemplanError(f"is a {type(given).__name__}, not a dict of keywords", where=where, hint=hint)
    other = next((key for key in given if not isinstance(key, str)), None)
    if other is not None:
        raise MemplanError(f"has the key {other!r}, which is no name of an argument", where=where, hint=hint)
    return dict(given)


def require_torch(where: str) -> None:
    """Raise `TorchNotInstalled`, which says how to install torch, unless torch can be imported.

    Args:
        where: What needs torch: a public name, a command, or a model's name.
    """
    if find_spec("torch") is None:
        hint = "pip install 'memplan[torch]'; without torch, memplan solves, and reads and checks saved plans"
        raise TorchNotInstalled("needs torch, which is not installed", where=where, hint=hint)


def require_library(name: str, *, where: str, install: str) -> None:
    """Raise `LibraryNotInstalled`, which says how to install a library of others, unless it can be imported.

    Args:
        name: The package that is imported.
        where: What needs it: a module of memplan.
        install: The command that installs it.
    """
    if find_spec(name) is None:
        raise LibraryNotInstalled(f"needs {name}, which is not installed", where=where, hint=install)
