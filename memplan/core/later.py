"""Imports functions when they are first asked for: policies by name, and what methods such as `Plan.report()` call.

`memplan/__init__.py` says once where the latter are, so that no file of `core` names one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from memplan.errors import MemplanError

_HOMES: dict[str, str] = {}  # written while memplan is imported, and never afterwards


def provide(homes: Mapping[str, Iterable[str]]) -> None:
    """Say which functions are in each module."""
    _HOMES.update({name: module for module, names in homes.items() for name in names})


def later(name: str) -> Callable[..., Any]:
    """Return the function of that name; its module is imported now."""
    found: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return found


def policy_in(table: Mapping[str, tuple[str, str]], option: str, asked: str | Callable[..., Any], room: str) -> Any:
    """Return the policy of that name in a table of modules and functions, or the given function itself.

    Raises `MemplanError` for an unknown name.
    """
    if callable(asked):
        return asked
    if asked not in table:
        raise MemplanError(f"{option}={asked!r}", hint=f"choose one of: {', '.join(map(repr, table))}")
    module, name = table[asked]
    return getattr(import_module(f"{room}.{module}"), name)
