"""Scenarios of `memplan.compile` of models that ranks run together, with the user's own optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import memplan
from memplan.distributed.local import local_tensor
from tests.distributed import tensor_parallelism
from tests.distributed.models import SmallConvolutions, SmallGpt, energy, images, tokens, vectors
from tests.distributed.scenarios import Batch, adamw, differences, in_small_buckets, mlp, raised, rank, sharded

_Outcome = tuple[list[float], list[list[Any]]]


def trained(
    model: nn.Module, call: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, batch: Batch
) -> _Outcome:
    """Train, evaluate, and train with other rows; return losses, and the gradients of each step with their types."""
    losses: list[float] = []
    gradients: list[list[Any]] = []
    for i in range(4):
        x = batch(rank(), i)
        if i == 2:
            model.eval()
            with torch.no_grad():
                losses.append(energy(call(x)).item())
            model.train()
        loss = energy(call(x[:2] if i == 3 else x))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        gradients.append([(type(p.grad).__name__, local_tensor(p.grad).tolist()) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def called(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    batch: Batch,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    **options: Any,
) -> dict[str, Any]:
    """Train a model by torch alone and compiled; return in what they differ, and the collectives of the plan."""
    models, optimizers, found = [], [], []
    compiled: Any = None
    for planned in (False, True):
        torch.manual_seed(0)
        models.append(wrap(make()))
        optimizers.append(optimizer(models[-1]))
        if planned:
            compiled = memplan.compile(models[-1], batch(rank(), 0), **options)
        found.append(trained(models[-1], compiled if planned else models[-1], optimizers[-1], batch))
    theirs, ours = found
    return {
        "different": [
            *([] if ours[0] == theirs[0] else [f"losses {ours[0]} {theirs[0]}"]),
            *([] if ours[1] == theirs[1] else ["gradients"]),
            *differences(models[1], models[0], (optimizers[1], optimizers[0])),
        ],
        "collectives": dict(Counter(c.kind for c in compiled.plan.collectives)),
        "again": sum(c.again for c in compiled.plan.collectives),
    }


def by_the_backend(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Train a model by torch alone and by `torch.compile` with memplan's backend; return in what they differ."""
    models, optimizers, found = [], [], []
    backend = memplan.Backend(sanitize="poison")
    for planned in (False, True):
        torch.manual_seed(0)
        models.append(wrap(SmallGpt(blocks=1)))
        optimizers.append(adamw(models[-1]))
        call = torch.compile(models[-1], backend=backend) if planned else models[-1]
        found.append(trained(models[-1], call, optimizers[-1], tokens))
    return {
        "different": [
            *([] if found[0] == found[1] else ["losses or gradients"]),
            *differences(models[1], models[0], (optimizers[1], optimizers[0])),
        ],
        "graphs": len(backend.graphs),
    }


def refused_by_the_backend() -> list[str]:
    """Return what the backend raises for a model of tensor parallelism within a budget, which eager would not keep."""
    placed = tensor_parallelism.on_all_ranks(tensor_parallelism.of_mlp, tensor_parallelism.mlp())
    call = torch.compile(placed, backend=memplan.Backend(arena_budget=0.9))
    return raised(lambda: call(tensor_parallelism.same_vectors(rank(), 0)))


def compiled_alike() -> dict[str, Any]:
    """Train small models of FSDP2, DDP and tensor parallelism; then do what a compiled model refuses.

    Before that, in the same launch, train whole steps of tensor parallelism.
    """
    steps = tensor_parallelism.placed_on_two()
    smallest: dict[str, Any] = {"arena_budget": "min", "policy": "recompute", "sanitize": "poison"}
    placed = partial(tensor_parallelism.on_all_ranks, tensor_parallelism.of_mlp)
    alike = {
        "fsdp": called(mlp, sharded, vectors),
        "fsdp min": called(SmallConvolutions, sharded, images, **smallest),
        "ddp": called(SmallConvolutions, in_small_buckets, images),
        "placed": called(tensor_parallelism.mlp, placed, tensor_parallelism.same_vectors, tensor_parallelism.adamw),
    }
    backends = {"fsdp": by_the_backend(sharded), "ddp": by_the_backend(nn.parallel.DistributedDataParallel)}
    found = {"alike": alike, "refused": refused(), "backends": backends, "placed": refused_by_the_backend()}
    return {**found, "steps": steps}


def refused() -> dict[str, list[str]]:
    """Return what a compiled model of several ranks raises for what it does not do."""
    model: Any = sharded(mlp())
    batch = vectors(rank(), 0)
    compiled = memplan.compile(model, batch)
    waiting = compiled(batch)
    found = {"waits": raised(lambda: compiled(batch))}
    waiting.sum().backward()
    found["twice"] = raised(lambda: _backward_twice(compiled(batch)))
    model.set_requires_gradient_sync(False)
    found["no sync"] = raised(lambda: compiled(batch))
    model.set_requires_gradient_sync(True)
    found["copied"] = raised(lambda: compiled.__reduce_ex__(4))
    found["differ"] = raised(lambda: memplan.compile(model, batch, policy="recompute" if rank() else "auto"))
    return found


def _backward_twice(result: torch.Tensor) -> None:
    loss = result.sum()
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
