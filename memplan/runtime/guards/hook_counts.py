"""Hooks of autograd and of modules: whether anyone has set one, as torch counts them in the whole process.

To ask a node of autograd how many it has, one must be set and removed again. Those of ours count as nobody's.
"""

from __future__ import annotations

import torch
from torch.utils.hooks import RemovableHandle


class _Ours:
    """How many hooks memplan itself has set in this process, only to ask."""

    count = 0


def hooks_ever_set() -> int:
    """How many hooks others have set so far, of whatever object: while it is the same, none was added."""
    return RemovableHandle.next_id - _Ours.count


def hooks_of_node(parameter: torch.Tensor) -> int:
    """How many hooks the node has that accumulates a parameter's gradient."""
    if not parameter.requires_grad:
        return 0
    with torch.inference_mode(False), torch.enable_grad():  # else there is no node to ask
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    count = 0
    for register in (node.register_hook, node.register_prehook):
        _Ours.count += 1  # before torch does: no thread may note a number that others reach later
        mine = register(_nothing)
        count += len(mine.hooks_dict_ref() or ()) - 1
        mine.remove()
    return count


def _nothing(*_: object) -> None:
    """Never called."""
