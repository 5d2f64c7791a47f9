"""The scenarios that `launch` runs, each on every rank; what they return is compared by the tests."""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memplan
from memplan.distributed.local import local_tensor
from memplan.trace import planning
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


def raised(make: Callable[[], Any]) -> list[str]:
    """Return the type and the words of the error that a function raises; nothing if it raises none."""
    try:
        make()
    except memplan.MemplanError as error:
        return [type(error).__name__, error.what]
    return []


def compiled(
    rows: int = 4, model: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a sharded model, its optimizer and its compiled step."""
    torch.manual_seed(0)
    made = sharded(model())
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2)
    return made, optimizer, memplan.compile_step(made, optimizer, energy, vectors(rank(), 0, rows=rows), **options)


def ranks_that_differ() -> dict[str, Any]:
    """Compile what is not alike on both ranks in many ways, one after the other."""
    odd = rank() == 1
    wide = lambda: nn.Sequential(nn.Linear(10, 18 if odd else 16), nn.Tanh(), nn.Linear(18 if odd else 16, 2))  # noqa: E731
    _, _, step = compiled()
    plan, found = step.plan, {}
    found["rows under a budget"] = raised(lambda: compiled(rows=6 if odd else 4, arena_budget=1.0))
    found["model"] = raised(lambda: compiled(model=wide))
    found["plan on one rank"] = raised(lambda: compiled(plan=plan if odd else None))
    found["option"] = raised(lambda: compiled(policy="recompute" if odd else "auto"))
    version = planning.__version__
    planning.__version__ = "0.0" if odd else version
    found["version"] = raised(compiled)
    planning.__version__ = version
    found["one fails"] = raised(lambda: compiled(solver="none such" if odd else "auto"))
    _, _, step = compiled(rows=6 if odd else 4)  # batches of other sizes are no difference without a budget
    found["rows"] = [bool(torch.isfinite(step(vectors(rank(), i, rows=6 if odd else 4)))) for i in range(2)]
    store = distributed.distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=1))
    found["one does not come"] = [] if odd else raised(compiled)
    return found


def rank_that_dies() -> dict[str, Any]:
    """Lose a rank between two steps, or in the backward of one; rank 0 tells what it saw."""
    found = {}
    model, optimizer, step = compiled()
    step(vectors(rank(), 0))
    before = [local_tensor(p).clone() for p in model.parameters()]
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for when in ("first", "again"):
        found[when] = raised(lambda: step(vectors(0, 1)))
    found["changed"] = sum(not torch.equal(a, local_tensor(p)) for a, p in zip(before, model.parameters(), strict=True))
    return found


def rank_that_dies_late() -> list[str]:
    """Lose a rank before the third reduction of a backward."""
    _, _, step = compiled()
    step(vectors(rank(), 0))
    seen: list[str] = []

    def hook(event: Any) -> None:
        if event.when == "start" and "reduce_scatter" in event.target:
            seen.append(event.op)
            if len(seen) == 3 and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    step.hooks.add(hook)
    return raised(lambda: step(vectors(rank(), 1)))
