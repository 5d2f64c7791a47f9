"""Examples, and settings, of the tests that need a CUDA device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.zoo import ZOO


@contextmanager
def same_kernels_each_time() -> Iterator[None]:
    """Choose deterministic kernels inside: those that add up in any order would differ from themselves."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before
    gc.collect()
    torch.cuda.empty_cache()


def example_on_cuda(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a nano model of the zoo and its inputs on the device, floating-point tensors in a type."""
    model, args = ZOO[name]("nano")

    def move(t: torch.Tensor) -> torch.Tensor:
        return t.to("cuda", dtype) if t.is_floating_point() else t.to("cuda")

    return model.to("cuda", dtype), pytree.tree_map_only(torch.Tensor, move, args)
