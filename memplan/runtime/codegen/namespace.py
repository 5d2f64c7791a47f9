"""The globals of generated code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Namespace:
    """The globals of generated code.

    `v12` is value 12, `k3` a kernel, `c4` a constant, `g5` a callback.
    """

    names: dict[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, prefix: str, thing: Any) -> str:
        """Return a name for `thing`; the same object gets the same name."""
        name = self._known.setdefault((prefix, id(thing)), f"{prefix}{len(self._known)}")
        self.names[name] = thing  # keeps it alive, so that no other object gets its id
        return name

    def move(self, value: int, tensor: torch.Tensor) -> None:
        """Replace the tensor of a value."""
        self.names[f"v{value}"] = tensor

    def define(self, source: str, function: str) -> Callable[..., Any]:
        """Compile `source` over these globals and return the function that it defines."""
        exec(compile(source, f"<memplan {function}>", "exec"), self.names)
        made: Callable[..., Any] = self.names[function]
        return made
