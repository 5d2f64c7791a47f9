"""Marks tests that repeat on another model, or with another option, what faster tests show.

`scripts/test.sh` leaves them out; `scripts/test.sh -m slow` runs them, and `scripts/test.sh -m ""` runs all tests.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.zoo import ZOO

FEW = ("mlp", "gpt2", "resnet", "lstm")  # linear layers, attention and tied weights, convolutions, recurrence


def slow(*values: Any) -> Any:
    """The parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def zoo() -> list[Any]:
    """The names of all models of the zoo; all but a few are slow."""
    return [name if name in FEW else slow(name) for name in ZOO]
