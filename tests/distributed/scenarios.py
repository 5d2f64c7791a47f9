"""The scenarios that `launch` runs, each on every rank; what they return is compared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan.distributed.local import local_tensor
from tests.distributed.models import SmallConvolutions, SmallGpt, energy, images, tokens, vectors

STEPS = 4
Batch = Callable[[int, int], torch.Tensor]


def rank() -> int:
    """Return the number of this process among the ranks."""
    return distributed.get_rank()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Return the model with each block, and the rest, divided among all ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def mlp() -> nn.Module:
    """Return layers whose rows two ranks divide, but for one layer of 7 and one of 1."""
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that most scenarios use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = STEPS) -> list[float]:
    """Train by torch alone; return the losses."""
    losses = []
    for i in range(steps):
        loss = energy(model(batch(rank(), i)))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def differences(one: nn.Module, two: nn.Module, optimizers: tuple[Any, Any]) -> list[str]:
    """Return the names of parameters, buffers and optimizer state of which this rank has other bytes."""
    pairs = zip(one.state_dict(keep_vars=True).items(), two.state_dict(keep_vars=True).items(), strict=True)
    found = [name for (name, a), (_, b) in pairs if not torch.equal(local_tensor(a), local_tensor(b))]
    ours, theirs = (list(o.state.values()) for o in optimizers)
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        found += [f"state {i} {key}" for key in b if not torch.equal(local_tensor(a[key]), local_tensor(b[key]))]
    return found


def compared(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    batch: Batch,
    optimizer: Callable[[nn.Module], Any] = adamw,
    **options: Any,
) -> dict[str, Any]:
    """Train a model by torch alone and by a compiled step; return in what they differ, and facts of the plan."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(wrap(make()))
    theirs, ours = models
    optimizers = optimizer(ours), optimizer(theirs)
    expected = eager(theirs, optimizers[1], batch)
    step = memplan.compile_step(ours, optimizers[0], energy, batch(rank(), 0), **options)
    losses = [step(batch(rank(), i)).item() for i in range(STEPS)]
    plan = step.plan
    return {
        "different": [
            *([] if losses == expected else [f"losses {losses} {expected}"]),
            *differences(ours, theirs, optimizers),
        ],
        "arena": plan.arena_size,
        "collectives": [c.kind for c in plan.collectives],
        "again": sum(c.again for c in plan.collectives),
    }


def fsdp() -> dict[str, Any]:
    return {"mlp": compared(mlp, sharded, vectors), "gpt": compared(SmallGpt, sharded, tokens)}


def ddp() -> dict[str, Any]:
    return {
        "gpt": compared(SmallGpt, DistributedDataParallel, tokens),
        "convolutions": compared(SmallConvolutions, DistributedDataParallel, images),
    }


def budgets() -> dict[str, Any]:
    """Train under budgets that only repeated gathers keep."""
    return {
        str(budget): compared(lambda: SmallGpt(blocks=3), sharded, tokens, arena_budget=budget)
        for budget in (0.5, "min")
    }
