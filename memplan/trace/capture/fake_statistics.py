"""Correct the type of the statistics that fake CPU kernels of normalisations keep for their backward.

With half-precision activations and float32 parameters, as under autocast, the kernels make float32 statistics. The fake
kernels make half-precision ones, which no backward would accept.
"""

from __future__ import annotations

import torch
from torch import fx

from memplan.trace.passes.rewrite import aten, correct_results, fake_mode_of, value

_STATISTICS = (1, 2)  # positions among the results: mean, and reciprocal of the deviation
_NORMALISATIONS = {
    *(aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
    *(aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default),
}


def correct_statistics(graph: fx.Graph) -> None:
    """Give statistics the type that the kernels give them, in place."""
    for node in list(graph.nodes):
        if node.target in _NORMALISATIONS and _is_mixed(node):
            with fake_mode_of(graph):
                made = [v.float() if i in _STATISTICS else v for i, v in enumerate(value(node))]
            correct_results(node, made)


def _is_mixed(node: fx.Node) -> bool:
    """Return whether the kernel computes in float32 because its parameters are float32."""
    x, *others = (value(n) for n in node.args if isinstance(n, fx.Node))
    half = x.device.type == "cpu" and x.dtype in {torch.bfloat16, torch.float16}
    return half and any(t.dtype is torch.float32 for t in others if isinstance(t, torch.Tensor))
