"""The options that are a choice between a few words: their types, their words, and the check of a given value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from memplan.errors import MemplanError

Checkpoint = Literal["follow", "plan"]
Gradients = Literal["arena", "outside"]
Kernels = Literal["aten", "inductor", "auto"]
Layout = Literal["auto", "tstack"]
Prefer = Literal["time", "memory"]
Sanitize = Literal["poison", "redzone"]
OnMismatch = Literal["replan", "error", "eager", "passive"]

CHECKPOINTS: tuple[Checkpoint, ...] = get_args(Checkpoint)
GRADIENTS: tuple[Gradients, ...] = get_args(Gradients)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PREFER: tuple[Prefer, ...] = get_args(Prefer)
SANITIZERS: tuple[Sanitize, ...] = get_args(Sanitize)
ON_MISMATCH: tuple[OnMismatch, ...] = get_args(OnMismatch)


def other_choices(name: str, choices: Sequence[str], but: str = "error") -> str:
    """Return the words of an option as a hint, without `but`: 'on_mismatch="replan", "eager" or "passive"'."""
    words = [f'"{choice}"' for choice in choices if choice != but]
    return f"{name}={', '.join(words[:-1])} or {words[-1]}"


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise `MemplanError` if `value` is none of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise MemplanError(f"{name}={value!r}", hint=f"choose one of: {', '.join(map(repr, choices))}")
