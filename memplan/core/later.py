"""Finds the functions behind methods whose work is done in rooms above: `Plan.report()`, `Plan.save()`, ...

`memplan/__init__.py` says once where each is, so that no file of `core` names one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {}  # written while memplan is imported, and never afterwards


def provide(homes: Mapping[str, Iterable[str]]) -> None:
    """Say which functions are in each module."""
    _HOMES.update({name: module for module, names in homes.items() for name in names})


def later(name: str) -> Callable[..., Any]:
    """Return the function of that name; its module is imported now."""
    found: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return found
