"""Runs oneDNN's LSTM, which returns a workspace for its backward only while gradients are enabled.

A compiled forward runs with gradients disabled by autograd; an inference program may run with gradients enabled. So the
functions here set the mode themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default._op


def layer_function(*, workspace: bool) -> Callable[..., Any]:
    """Return the function that runs `aten.mkldnn_rnn_layer`, with a workspace as its last result or with None."""
    return _with_workspace if workspace else _without_workspace


def _with_workspace(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch.enable_grad():
        return _LAYER(*args)


def _without_workspace(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch.no_grad():
        return _LAYER(*args)
