"""Prepares the host memory of a model whose step runs on another device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from memplan.trace.traced import TracedGraph


def prepare_host(model: nn.Module, traced: TracedGraph, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Pin the parameters, buffers and optimizer state that a step on CUDA copies from and to the host.

    Their bytes move to page-locked memory, once; the tensors stay the same objects.
    """
    if traced.runs_on and traced.device.type == "cuda":
        pin(model.parameters())
        pin(model.buffers())
        if optimizer is not None:
            pin(t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))


def pin(tensors: Iterable[torch.Tensor]) -> None:
    """Move the bytes of tensors to pinned memory, in place; tensors that share memory still share it."""
    moved: dict[int, torch.UntypedStorage] = {}
    for t in tensors:
        storage = t.untyped_storage()
        if not storage.nbytes() or t.is_pinned():
            continue
        key = storage.data_ptr()
        if key not in moved:
            moved[key] = storage.pin_memory()
        t.data = torch.empty(0, dtype=t.dtype).set_(moved[key], t.storage_offset(), t.shape, t.stride())
