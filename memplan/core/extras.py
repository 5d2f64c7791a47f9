"""Raises the error that says how to install an optional part of memplan. An extra is named in pyproject.toml."""

from __future__ import annotations

from importlib.util import find_spec

from memplan.errors import TorchNotInstalled


def require_torch(where: str) -> None:
    """Raise `TorchNotInstalled`, which says how to install torch, unless torch can be imported.

    Args:
        where: What needs torch: a public name, a command, or a model's name.
    """
    if find_spec("torch") is None:
        hint = "pip install 'memplan[torch]'; without torch, memplan solves, and reads and checks saved plans"
        raise TorchNotInstalled("needs torch, which is not installed", where=where, hint=hint)
