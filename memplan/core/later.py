"""Finds the functions behind methods whose work is done in rooms above: `Plan.report()`, `Plan.save()`, ...

`memplan/__init__.py` says once where each is, so that no file of `core` names one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {}  # written while memplan is imported, and never afterwards


def provide(homes: Mapping[str, str]) -> None:
    """Say in which module each function is, by its name."""
    _HOMES.update(homes)


def later(name: str) -> Callable[..., Any]:
    """Return the function of that name; its module is imported now."""
    found: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return found
