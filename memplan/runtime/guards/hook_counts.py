"""Counts the hooks that are set on autograd nodes and modules; torch numbers them in the whole process.

The hooks of an autograd node can only be counted by adding one and removing it again. Hooks that memplan adds for this
are subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class _Ours:
    """The number of hooks that memplan itself has added in this process to count others."""

    count = 0


def hooks_ever_set() -> int:
    """Return how many hooks others have added so far, on any object: while the number is the same, none was added."""
    return RemovableHandle.next_id - _Ours.count


def hooks_of_node(parameter: torch.Tensor) -> int:
    """Return how many hooks the node has that accumulates the gradient of a parameter."""
    if not parameter.requires_grad:
        return 0
    with torch.inference_mode(False), torch.enable_grad():  # otherwise there is no node
        return hooks_on(torch.autograd.graph.get_gradient_edge(parameter).node)


def hooks_on(node: Any) -> int:
    """Return how many hooks a node of autograd has."""
    count = 0
    for register in (node.register_hook, node.register_prehook):
        _Ours.count += 1  # before torch counts it: no other thread may see a number that real hooks reach later
        probe = register(_nothing)
        count += len(probe.hooks_dict_ref() or ()) - 1
        probe.remove()
    return count


class HookSearch:
    """Searches parameters for hooks that autograd would call; quick where none was set since it last found none."""

    def __init__(self) -> None:
        self._without: tuple[int, list[int]] = (-1, [])  # the hooks ever set, and the parameters, when none was found

    def first(self, parameters: Sequence[torch.Tensor]) -> int | None:
        """Return the position of the first parameter with a hook, on itself or on its node; None if there is none."""
        # if an id is reused by another tensor, its hook was set later
        now = (hooks_ever_set(), list(map(id, parameters)))
        for i, p in enumerate(parameters):
            if p._backward_hooks or p._post_accumulate_grad_hooks or (now != self._without and hooks_of_node(p)):
                return i
        self._without = now
        return None


def _nothing(*_: object) -> None:
    """Does nothing; it is never called."""
