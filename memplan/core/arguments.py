"""The one rule by which example inputs become the arguments of a call: in the API, and for a FACTORY's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.errors import MemplanError

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
