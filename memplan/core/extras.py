"""Raises the error that says how to install an optional part of memplan. An extra is named in pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

from memplan.errors import LibraryNotInstalled, TorchNotInstalled


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
