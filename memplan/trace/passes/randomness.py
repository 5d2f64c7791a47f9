"""Find the calls that draw random numbers.

Tags name the ops that may draw. Attention is one of them, and draws nothing without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_PROBABILITIES = ("dropout_p", "dropout")  # arguments of attention and recurrent layers: at zero they draw nothing


def draws(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `target(*args, **kwargs)` draws random numbers, as far as its schema and its arguments tell."""
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in _PROBABILITIES:
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return not (isinstance(given, (int, float)) and given == 0)
    return True
