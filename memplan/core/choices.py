"""The options that are a choice between a few words: their types, their words, and the check of a given value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from memplan.errors import MemplanError

Checkpoint = Literal["follow", "plan"]
Compression = Literal["int8"]  # real numbers as 8-bit codes
Gradients = Literal["arena", "outside"]
Kernels = Literal["aten", "inductor"]
Layout = Literal["auto", "tstack"]
Sanitize = Literal["poison", "redzone"]
OnMismatch = Literal["replan", "error", "eager", "passive"]

CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "checkpoint": get_args(Checkpoint),
        "compress": (None, *get_args(Compression)),
        "layout": get_args(Layout),
        "gradients": get_args(Gradients),
        "kernels": (None, *get_args(Kernels)),
        "sanitize": (None, *get_args(Sanitize)),
        "on_mismatch": get_args(OnMismatch),
        **dict.fromkeys(("in_place", "fullgraph"), (True, False)),
        "train": (None, True, False),
    }
)


def other_choices(name: str, but: str = "error") -> str:
    """Return the words of an option as a hint, without `but`: 'on_mismatch="replan", "eager" or "passive"'."""
    words = [f'"{choice}"' for choice in CHOICES[name] if choice != but]
    return f"{name}={', '.join(words[:-1])} or {words[-1]}"


def require_choices(options: object) -> None:
    """Raise `MemplanError` for the first option of these that has none of its values."""
    for name, choices in CHOICES.items():
        value = getattr(options, name, choices[0])
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            raise MemplanError(f"{name}={value!r}", hint=f"choose one of: {', '.join(map(repr, choices))}")
