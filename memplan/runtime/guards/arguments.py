"""Arguments of a call, arranged as the example has them: by position or by keyword, with or without defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Arrangement:
    """The example's way to give arguments: which of them by position and which by keyword."""

    def __init__(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the signature. `args`, `kwargs`: those of the example."""
        self._count, self._names = len(args), tuple(kwargs)
        parameters: Mapping[str, inspect.Parameter] = {}
        with suppress(TypeError, ValueError):  # a callable without a signature
            parameters = inspect.signature(forward).parameters
        self._positions = [name for name, p in parameters.items() if p.kind in _POSITIONAL]
        self._defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        example = {**dict(zip(self._positions, args, strict=False)), **kwargs}
        defaults = self._defaults.items()
        self._omissible = {name: value for name, value in defaults if name in example and _same(example[name], value)}

    def arranged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as the example has them; unchanged where that is impossible.

        A default that only one of both gives is added, or left out.
        """
        positions = self._positions
        given = dict(zip(positions, args, strict=False))
        if max(len(args), self._count) > len(positions) or given.keys() & kwargs.keys():
            return args, dict(kwargs)
        given.update(kwargs)
        wanted = [*positions[: self._count], *self._names]
        if any(name not in given and name not in self._omissible for name in wanted):
            return args, dict(kwargs)
        values = {name: given.pop(name) if name in given else self._omissible[name] for name in wanted}
        rest = {name: x for name, x in given.items() if not (name in self._defaults and _same(x, self._defaults[name]))}
        by_name = {name: values[name] for name in self._names}
        return tuple(values[name] for name in positions[: self._count]), {**by_name, **rest}


def _same(one: Any, two: Any) -> bool:
    """Return whether two values are the same object, or the same number or text."""
    simple = type(one) is type(two) and isinstance(one, (bool, int, float, str))
    return one is two or (simple and repr(one) == repr(two))
