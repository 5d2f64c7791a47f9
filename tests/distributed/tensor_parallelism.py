"""Scenarios of tensor parallelism, alone and with FSDP2: the same bits as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from memplan.distributed.local import is_distributed
from tests.distributed.models import SmallLlama, tokens, vectors
from tests.distributed.scenarios import compared

Place = Callable[[nn.Module, DeviceMesh], nn.Module]
_COLUMNS, _ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def on_all_ranks(place: Place, model: nn.Module) -> nn.Module:
    """Return the model with its parameters placed on all ranks."""
    return place(model, init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",)))


def in_two_dimensions(place: Place, model: Any) -> Any:
    """Return the model with its parameters placed on pairs of ranks, and divided by rows among the pairs."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    place(model, mesh["tp"])
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def by_columns_and_rows(model: Any, mesh: DeviceMesh) -> Any:
    """Return a small Llama with its linear layers and its vocabulary divided; norms are on each rank."""
    outside: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outside)
    inside: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _COLUMNS} | {
        name: RowwiseParallel() for name in _ROWS
    }
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    return model


def by_sequence(model: Any, mesh: DeviceMesh) -> Any:
    """Return a small Llama whose norms are applied to a part of the sequence on each rank: sequence parallelism."""
    outside: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outside)
    inside: dict[str, ParallelStyle] = {name: ColwiseParallel(input_layouts=Shard(1)) for name in _COLUMNS}
    inside |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in _ROWS}
    inside |= {name: SequenceParallel() for name in ("one", "two")}
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    return model


def mlp() -> nn.Sequential:
    """Return layers of 10, 6 and 8: the three rows of a rank are uneven for two others."""
    return nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 8))


def of_mlp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return the layers, the first by columns and the second by rows."""
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def rows_between(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return five layers with the rows of a batch divided among ranks for the norm in between."""
    how: dict[str, ParallelStyle] = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, how)


def mlp_with_norm() -> nn.Module:
    """Return five layers, with a norm and uneven parts."""
    return nn.Sequential(*mlp(), nn.LayerNorm(8), nn.Linear(8, 6))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with a group for DTensors and one for others, which torch's updates do not mix."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if is_distributed(p) is kind] for kind in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-2, fused=True)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for which torch has no fused update."""
    return torch.optim.RMSprop(model.parameters(), lr=1e-2)


def same_tokens(rank: int, step: int) -> torch.Tensor:
    """Return a batch of tokens, the same for all ranks."""
    return tokens(0, step, vocabulary=63)


def same_vectors(rank: int, step: int) -> torch.Tensor:
    """Return a batch of vectors, the same for all ranks."""
    return vectors(0, step)


def vectors_of_pairs(rank: int, step: int) -> torch.Tensor:
    """Return a batch of vectors, another one for each pair of ranks."""
    return vectors(rank // 2, step)


def placed_on_two() -> dict[str, Any]:
    """Train small models on two ranks by torch's tensor parallelism and by compiled steps."""
    small = partial(SmallLlama, blocks=1, vocabulary=63)
    placed = partial(on_all_ranks, of_mlp)
    smallest: dict[str, Any] = {"arena_budget": "min", "policy": "recompute", "sanitize": "poison"}
    return {
        "mlp": compared(mlp, placed, same_vectors, adamw),
        "clipped": compared(mlp, placed, same_vectors, rmsprop, clipped=0.01),
        "accumulated": compared(mlp, placed, same_vectors, adamw, accumulate=2),
        "columns": compared(small, partial(on_all_ranks, by_columns_and_rows), same_tokens, adamw),
        "sequence min": compared(small, partial(on_all_ranks, by_sequence), same_tokens, adamw, **smallest),
    }


def placed_on_four() -> dict[str, Any]:
    """Train a small model on four ranks, in two dimensions, by torch and by compiled steps."""
    divided = partial(in_two_dimensions, rows_between)
    smallest: dict[str, Any] = {"arena_budget": "min", "policy": "recompute", "sanitize": "poison"}
    return {
        "whole": compared(mlp_with_norm, divided, vectors_of_pairs, adamw),
        "min": compared(mlp_with_norm, divided, vectors_of_pairs, adamw, **smallest),
    }
