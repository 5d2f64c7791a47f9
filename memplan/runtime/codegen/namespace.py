"""The globals of generated code, and the lists of tensors that are updated with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Namespace:
    """The globals of generated code.

    `v12` is value 12, `k3` a kernel, `c4` a constant, `g5` a callback, `s6` a run of ops for torch's interpreter, and
    `l7` the list of tensors of a run, which rarely change.
    """

    names: dict[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, int], str] = field(default_factory=dict)
    _places: dict[int, list[tuple[Any, int]]] = field(
        default_factory=dict
    )  # by value: the lists that contain it, and its position in each

    def add(self, prefix: str, thing: Any) -> str:
        """Return a name for `thing`; the same object gets the same name."""
        name = self._known.setdefault((prefix, id(thing)), f"{prefix}{len(self._known)}")
        self.names[name] = thing  # keeps it alive, so that no other object gets its id
        return name

    def following(self, tensors: Any, values: Sequence[int | None]) -> str:
        """Return a name for a list of tensors; `move` updates the elements of `values` (None: a constant)."""
        for position, value in enumerate(values):
            if value is not None:
                self._places.setdefault(value, []).append((tensors, position))
        return self.add("l", tensors)

    def move(self, value: int, tensor: torch.Tensor) -> None:
        """Replace the tensor of a value, here and in the lists that contain it."""
        self.names[f"v{value}"] = tensor
        for tensors, position in self._places.get(value, ()):
            tensors[position] = tensor

    def define(self, source: str, function: str) -> Callable[..., Any]:
        """Compile `source` over these globals and return the function that it defines."""
        exec(compile(source, f"<memplan {function}>", "exec"), self.names)
        made: Callable[..., Any] = self.names[function]
        return made
