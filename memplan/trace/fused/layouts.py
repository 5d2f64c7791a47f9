"""Chooses between Inductor's layouts of convolutions and those of the model."""

from __future__ import annotations

import torch
from torch import fx

from memplan.core.code_options import CodeOptions
from memplan.trace.fused.environment import chooses_layouts
from memplan.trace.passes.rewrite import aten

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def first_code(graph: fx.Graph) -> CodeOptions | None:
    """Return how to generate the code of a joint graph where nothing else is asked for; None: as Inductor does.

    Inductor runs convolutions with channels last, and keeps a copy in that layout of each weight that is not. Without
    these copies a step needs less, so the layouts are the model's own where there would be any.
    """
    if chooses_layouts() and any(
        map(_copies_its_weight, graph.find_nodes(op="call_function", target=aten.convolution.default))
    ):
        return CodeOptions(layouts=False)
    return None


def _copies_its_weight(convolution: fx.Node) -> bool:
    """Return whether Inductor would reorder the weight of a convolution."""
    node = convolution.args[1]
    weight = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(weight, torch.Tensor) or weight.dim() not in _CHANNELS_LAST:
        return False
    return not weight.is_contiguous(memory_format=_CHANNELS_LAST[weight.dim()])
