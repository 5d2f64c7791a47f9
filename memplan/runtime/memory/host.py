"""Prepares the host memory of a model whose step runs on another device."""

from __future__ import annotations

import torch
from torch import nn

from memplan.devices.host_memory import pin
from memplan.devices.kinds import is_accelerator
from memplan.trace.traced import TracedGraph


def prepare_host(model: nn.Module, traced: TracedGraph, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Pin the parameters, buffers and optimizer state that a step on an accelerator copies from and to the host.

    Their bytes move to page-locked memory, once; the tensors stay the same objects.
    """
    if traced.runs_on and is_accelerator(traced.device):
        pin(model.parameters())
        pin(model.buffers())
        if optimizer is not None:
            state = (t for state in optimizer.state.values() for t in state.values())
            pin(t for t in state if isinstance(t, torch.Tensor))
