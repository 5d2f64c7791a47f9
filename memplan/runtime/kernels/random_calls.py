"""Saves the state of the CPU's random generator, and runs kernels with a saved one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def save_state(place: torch.Tensor) -> None:
    """Write the state of the generator into `place`: uint8, as many elements as `torch.get_rng_state()` has."""
    place.copy_(torch.default_generator.get_state())


def with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes a saved state before the arguments of `function`, and draws with it.

    The generator has the same state afterwards as before.
    """
    generator = torch.default_generator

    def drawing_again(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = generator.get_state()
        generator.set_state(state)
        try:
            return function(*args, **kwargs)
        finally:
            generator.set_state(now)

    return drawing_again
