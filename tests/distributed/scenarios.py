"""The scenarios that `launch` runs, each on every rank; what they return is compared by the tests."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate as running_sums
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import memplan
from benchmarks.peak_measure import live_bytes, memory_events
from memplan.distributed.local import local_tensor
from tests.distributed.models import EvenGpt, SmallConvolutions, SmallGpt, SmallLlama, energy, images, tokens, vectors

STEPS = 4
_MEASURED = 4  # steps whose smallest peak counts
_KINDS = ("gather_parameter", "reduce_scatter", "gather_parameter, reduce_scatter")
checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
PLANNING: Any = importlib.import_module("memplan.trace.planning")
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


def sharded_with_two_groups(model: nn.Module) -> nn.Module:
    """Return the model divided among all ranks, with a group for reductions, if torch can make one."""
    made: Any = sharded(model)
    getattr(made, "set_separate_reduce_scatter_group", lambda: None)()  # of torch 2.13
    return cast("nn.Module", made)


def mlp() -> nn.Module:
    """Return layers whose rows two ranks divide, but for one layer of 7 and one of 1."""
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that most scenarios use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def eager(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    steps: int = STEPS,
    *,
    clipped: float | None = None,
    accumulate: int = 1,
) -> list[float]:
    """Train by torch alone; return the losses. `clipped`: the norm to which gradients are clipped."""
    losses = []
    for i in range(steps):
        loss = energy(model(batch(rank(), i)))
        (loss / accumulate).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if (i + 1) % accumulate:
            continue
        if clipped is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clipped)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(one: nn.Module, two: nn.Module, optimizers: tuple[Any, Any]) -> list[str]:
    """Return the names of parameters, buffers and optimizer state of which this rank has other bytes."""
    pairs = zip(one.state_dict(keep_vars=True).items(), two.state_dict(keep_vars=True).items(), strict=True)
    found = [name for (name, a), (_, b) in pairs if not torch.equal(local_tensor(a), local_tensor(b))]
    assert len(optimizers[0].state) == len(optimizers[1].state)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        a, b = optimizers[0].state[p], optimizers[1].state[q]
        found += [f"{key} of {name}" for key in b if not torch.equal(local_tensor(a[key]), local_tensor(b[key]))]
    return found


def compared(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    batch: Batch,
    optimizer: Callable[[nn.Module], Any] = adamw,
    *,
    clipped: float | None = None,
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Train a model by torch alone and by a compiled step; return in what they differ, and facts of the plan.

    `clipped`: the norm to which gradients are clipped. `accumulate`: the batches for each update.
    """
    torch.manual_seed(0)
    theirs = wrap(make())
    reference = optimizer(theirs)
    expected = eager(theirs, reference, batch, clipped=clipped, accumulate=accumulate)
    before = live_bytes()
    torch.manual_seed(0)
    ours = wrap(make())
    optimizers = optimizer(ours), reference
    how = {"clip_grad_norm": clipped, "accumulate": accumulate, **options}
    example = batch(rank(), 0)  # which a step keeps
    step = memplan.compile_step(ours, optimizers[0], energy, example, **how)
    if "sanitize" in options:
        step.hooks.add(_late_for_collectives)
    losses = [step(batch(rank(), i)).item() for i in range(STEPS)]
    plan = step.plan
    different = [
        *([] if losses == expected else [f"losses {losses} {expected}"]),
        *differences(ours, theirs, optimizers),
    ]
    alone = optimizer is adamw and accumulate == 1 and "sanitize" not in options  # no update of torch's
    return {
        "different": different,
        "unplanned": unplanned_bytes(step, example, before) if alone else 0,
        "arena": plan.arena_size,
        "collectives": dict(Counter(c.kind for c in plan.collectives)),
        "lines": [c.line for c in plan.collectives],
        "again": sum(c.again for c in plan.collectives),
        "early": sum(c.early for c in plan.collectives),
        "groups": {kind: len({c.group for c in plan.collectives if c.kind in kind}) for kind in _KINDS},
    }


def unplanned_bytes(step: Any, batch: torch.Tensor, before: int) -> int:
    """Return by how many bytes a step exceeds its plan's total, by torch's memory events; negative if it does not.

    `before`: the bytes of tensors that were alive before its model was made.
    """
    standing = live_bytes() - before
    memory_events(lambda: step(batch))  # which shows the profiler what lives from step to step
    peaks = [max(running_sums(e.nbytes for e in memory_events(lambda: step(batch)))) for _ in range(_MEASURED)]
    # The profiler does not see what a thread of gloo's frees: the copies of a collective, where that thread is the
    # last to let go of them. So a step can look larger than it was, never smaller.
    return int(standing + min(peaks) - step.plan.total)


def trained_alike(folder: str) -> dict[str, Any]:
    """Train in many ways by torch and by compiled steps: FSDP2, DDP, budgets, other optimizers, casts.

    `folder`: where a checkpoint is saved.
    """
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    small, llama = partial(SmallGpt, blocks=1), partial(SmallLlama, blocks=1)
    cases = {
        "fsdp gpt": compared(small, sharded, tokens),
        "fsdp min": compared(small, sharded, tokens, arena_budget="min", policy="recompute", sanitize="poison"),
        "fsdp half": compared(small, sharded, tokens, arena_budget=0.6, policy="recompute"),
        "fsdp one by one": compared(mlp, sharded, vectors, in_flight=0),
        "fsdp two groups": compared(mlp, sharded_with_two_groups, vectors, arena_budget=1.0, sanitize="poison"),
        "fsdp uneven min": compared(mlp, sharded, vectors, arena_budget="min", policy="recompute"),
        "fsdp bfloat16": compared(mlp, partial(sharded, mp_policy=halves), vectors, sanitize="poison"),
        "fsdp clipped": compared(mlp, sharded, vectors, adagrad, clipped=0.01),
        "fsdp accumulated": compared(mlp, sharded, vectors, accumulate=2),
        "fsdp batch norm": compared(SmallConvolutions, sharded, images, arena_budget=0.8, policy="recompute"),
        "fsdp llama": compared(llama, sharded, tokens, arena_budget=0.75, policy="recompute"),
        "ddp tied": compared(partial(SmallGpt, blocks=0), DistributedDataParallel, tokens, adagrad, clipped=0.01),
        "ddp convolutions": compared(SmallConvolutions, in_small_buckets, images),
        "ddp min": compared(SmallConvolutions, in_small_buckets, images, arena_budget="min", policy="recompute"),
    }
    return {
        "alike": cases,
        "between": between_steps(),
        "buffers": buffers_of_the_first_rank(),
        "pipeline": stages_of_a_pipeline(),
        "planned": plan_of_two(),
        "saved": saved_after_training(folder),
        "shapes": other_shapes_under_a_budget(),
    }


def plan_of_two() -> list[list[Any]]:
    """Return the shape of a plan of this rank."""
    return shape_of(memplan.plan(sharded(EvenGpt()), tokens(0, 0)), 2)


def shape_of(plan: memplan.Plan, ranks: int) -> list[list[Any]]:
    """Return the ops of a plan, and its collectives as they run, with the shape of what is divided among `ranks`.

    How ops are ordered depends on the bytes of a rank's parts.
    """
    ops = sorted([op.name, op.target] for op in plan.graph.ops)
    divided = [(c, ranks if c.kind == "reduce_scatter" else 1) for c in plan.collectives]
    return [*ops, *([c.name, c.shape[0] * n, *c.shape[1:]] for c, n in divided)]


def stages_of_a_pipeline() -> list[bool]:
    """Train a pipeline of two stages by torch's schedules, with the stages compiled and as they are; compare them."""
    found = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        trained = []
        for planned in (False, True):
            torch.manual_seed(0)
            part = nn.Sequential(*((nn.Linear(10, 16), nn.Tanh()), (nn.Linear(16, 4), nn.Tanh()))[rank()])
            optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
            example = torch.ones(2, (10, 16)[rank()], requires_grad=rank() > 0)
            ran: Any = memplan.compile(part, example) if planned else part
            runs: Any = schedule(PipelineStage(ran, rank(), 2, torch.device("cpu")), n_microbatches=2, loss_fn=_squares)
            losses: list[torch.Tensor] = []
            for i in range(2):
                if rank() == 0:
                    runs.step(vectors(0, i))
                else:
                    runs.step(target=torch.ones(4, 4), losses=losses)
                optimizer.step()
                optimizer.zero_grad()
            trained.append([*losses, *part.parameters()])
        found.append(all(torch.equal(one, two) for one, two in zip(*trained, strict=True)))
    return found


def _squares(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def saved_after_training(folder: str) -> dict[str, list[float]]:
    """Train by a compiled step and save a distributed checkpoint; return the whole parameters and their moments."""
    torch.manual_seed(0)
    model = sharded(mlp())
    optimizer = adamw(model)
    step = memplan.compile_step(model, optimizer, energy, vectors(rank(), 0))
    for i in range(2):
        step(vectors(rank(), i))
    checkpoint.save(checkpointed(model, optimizer), checkpoint_id=folder)
    return whole_values(model, optimizer)


def checkpointed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a model and its optimizer as torch's distributed checkpoints take it."""
    states = get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1]}


def whole_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Return the elements of each parameter and of its first moment, of all ranks together."""
    found: dict[str, list[float]] = {}
    for name, p in model.named_parameters():
        for key, part in ((name, p), (f"moment of {name}", optimizer.state[p]["exp_avg"])):
            whole = part.full_tensor() if hasattr(part, "full_tensor") else part
            found[key] = whole.detach().flatten().tolist()
    return found


def loaded_by_four(folder: str) -> dict[str, Any]:
    """Load the checkpoint of two ranks on four, and train on by torch and by a compiled step; compare them."""
    models: list[nn.Module] = []
    optimizers: list[torch.optim.Optimizer] = []
    for _ in range(2):
        models.append(sharded(mlp()))
        optimizers.append(adamw(models[-1]))
        load_checkpoint(models[-1], optimizers[-1], folder)
    loaded = whole_values(models[0], optimizers[0])
    expected = eager(models[1], optimizers[1], vectors, steps=2)
    step = memplan.compile_step(models[0], optimizers[0], energy, vectors(rank(), 0))
    losses = [step(vectors(rank(), i)).item() for i in range(2)]
    different = differences(models[0], models[1], (optimizers[0], optimizers[1]))
    return {"loaded": loaded, "different": [*different, *([] if losses == expected else ["losses"])]}


def load_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load what `saved_after_training` has saved, on any number of ranks."""
    states = checkpointed(model, optimizer)
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def _late_for_collectives(event: Any, seconds: float = 0.001) -> None:
    """Let rank 1 come late to each collective: what the other reads before it has arrived would be poison."""
    if event.when == "start" and event.target.startswith("memplan_distributed") and rank() == 1:
        time.sleep(seconds)


def in_small_buckets(model: nn.Module) -> nn.Module:
    """Return a model whose gradients torch averages in buckets of 1 KiB."""
    return DistributedDataParallel(model, bucket_cap_mb=1 / 1024)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for which torch has no fused update."""
    return torch.optim.Adagrad(model.parameters(), lr=1e-2)


def _same_batch(number: int, rank: int, _: int) -> torch.Tensor:
    """Return the batch of that number, whatever the step."""
    return vectors(rank, number)


def between_steps() -> dict[str, Any]:
    """Evaluate by torch between compiled steps, and do what a compiled step refuses."""
    torch.manual_seed(0)
    theirs = sharded(mlp())
    torch.manual_seed(0)
    ours: Any = sharded(mlp())
    optimizers = adamw(ours), adamw(theirs)
    with torch.no_grad():
        ours(vectors(rank(), 9))  # which leaves whole parameters in the model
    step = memplan.compile_step(ours, optimizers[0], energy, vectors(rank(), 0))
    evaluated = []
    for i in range(2):
        step(vectors(rank(), i))
        eager(theirs, optimizers[1], partial(_same_batch, i), steps=1)
        with torch.no_grad():
            evaluated.append(torch.equal(ours(vectors(rank(), 9)), theirs(vectors(rank(), 9))))
    shorter = step(vectors(rank(), 2, rows=1))  # planned anew, with the same collectives
    found: dict[str, Any] = {"evaluated": evaluated, "shorter": bool(shorter.isfinite())}
    saved = {name: p.full_tensor() for name, p in ours.state_dict().items()}
    found["state"] = sorted(saved) == sorted(mlp().state_dict())
    ours.set_requires_gradient_sync(False)
    found["no sync"] = raised(lambda: step(vectors(rank(), 3)))
    ours.set_requires_gradient_sync(True)
    replicas = DistributedDataParallel(mlp())
    again = memplan.compile_step(replicas, adamw(replicas), energy, vectors(rank(), 0))
    with replicas.no_sync():
        found["ddp no sync"] = raised(lambda: again(vectors(rank(), 0)))
    return found


def raised(make: Callable[[], Any]) -> list[str]:
    """Return the type and the words of the error that a function raises; nothing if it raises none."""
    try:
        make()
    except memplan.MemplanError as error:
        return [type(error).__name__, error.what]
    return []


def with_seed(model: Callable[[], nn.Module]) -> nn.Module:
    """Return a new model, with the same parameters each time."""
    torch.manual_seed(0)
    return model()


def compiled(
    rows: int = 4, model: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a sharded model, its optimizer and its compiled step."""
    made = sharded(with_seed(model))
    optimizer = torch.optim.SGD(made.parameters(), lr=1e-2)
    return made, optimizer, memplan.compile_step(made, optimizer, energy, vectors(rank(), 0, rows=rows), **options)


def ranks_that_differ() -> dict[str, Any]:
    """Compile what is not alike on both ranks in many ways, one after the other; then lose a rank in a backward."""
    odd = rank() == 1
    found: dict[str, Any] = {}
    _, _, step = compiled()
    plan, rows = step.plan, 6 if odd else 4
    found["rows under a budget"] = raised(lambda: compiled(rows=rows, arena_budget=1.0))
    found["model"] = raised(lambda: compiled(model=lambda: nn.Linear(10, 18 if odd else 16)))
    found["plan on one rank"] = raised(lambda: compiled(plan=plan if odd else None))
    versions = PLANNING.versions
    PLANNING.versions = lambda: versions() | ({"torch": "2.12.0"} if odd else {})
    found["version"] = raised(compiled)
    PLANNING.versions = versions
    found["one fails"] = raised(lambda: compiled(solver="none such" if odd else "auto"))
    model, _, step = compiled(rows=rows)  # batches of other sizes are no difference without a budget
    theirs = sharded(with_seed(mlp))
    batch = partial(vectors, rows=rows)
    expected = eager(theirs, torch.optim.SGD(theirs.parameters(), lr=1e-2), batch, steps=2)
    found["rows"] = [step(batch(rank(), i)).item() == loss for i, loss in enumerate(expected)]
    pairs = zip(model.parameters(), theirs.parameters(), strict=True)
    found["rows"].append(all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs))
    store = distributed.distributed_c10d._get_default_store()
    if not odd:
        found["one does not come"] = raised(lambda: within(1, compiled))
    distributed.barrier()
    found["after one alone"] = raised(lambda: compiled(policy="recompute" if odd else "auto"))
    found["both fail"] = [raised(lambda: compiled(solver="none such")) for _ in range(2)]
    found["late option"] = late_options()
    if odd:
        store.set("found", json.dumps(found))
    else:
        found["other"] = json.loads(store.get("found"))
    distributed.barrier()
    step.hooks.add(_dying_at_the_third_reduction())
    found["dies"] = raised(lambda: step(vectors(rank(), 0, rows=rows)))
    found["dead"] = raised(lambda: step(vectors(rank(), 0, rows=rows)))
    return found


def within(seconds: float, run: Callable[[], Any]) -> Any:
    """Run a function while this rank waits for others no longer than so many seconds."""
    home: Any = distributed.distributed_c10d
    home._set_pg_timeout(datetime.timedelta(seconds=seconds), distributed.group.WORLD)
    try:
        return run()
    finally:
        home._set_pg_timeout(datetime.timedelta(seconds=30), distributed.group.WORLD)


def late_options() -> list[list[str]]:
    """Set options of FSDP2 and DDP after their steps are compiled; return what their next calls raise."""
    divided: Any
    divided, _, step = compiled()
    divided.set_gradient_divide_factor(3.0)
    found = [raised(lambda: step(vectors(rank(), 0)))]
    copied = DistributedDataParallel(nn.Linear(10, 2))
    other = memplan.compile_step(copied, adamw(copied), energy, vectors(rank(), 0))
    with copied.join():
        found.append(raised(lambda: other(vectors(rank(), 0))))
        copied._join_config = copied._join_config._replace(enable=False)  # no rank waits for a backward of another
    copied.register_comm_hook(None, lambda _, bucket: bucket.buffer())
    return [*found, raised(lambda: other(vectors(rank(), 0)))]


class Scaled(nn.Module):
    """A model with a buffer that it only reads, one that it does not read, a tensor that is neither, and a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 8)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("other", torch.zeros(2))
        self.offset, self.lock = torch.ones(8), threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * self.scale + self.offset
        return y


def buffers_of_the_first_rank() -> list[list[float]]:
    """Write to a buffer on each rank; return the losses and buffers of torch's DDP and of a compiled step."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model: Any = DistributedDataParallel(Scaled())
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step: Any = memplan.compile_step(model, optimizer, energy, vectors(rank(), 0)) if planned else None
        losses: list[float] = []
        for i in range(2):
            model.module.scale.fill_(2.0 + i + rank())
            model.module.other.fill_(5.0 + i + rank())
            batch = vectors(rank(), i)
            losses += [step(batch).item()] if planned else eager(model, optimizer, partial(_same_batch, i), steps=1)
        found.append([*losses, model.module.scale.item(), *model.module.other.tolist()])
    return found


def other_shapes_under_a_budget() -> dict[str, Any]:
    """Call a step with a budget with batches of another shape, and back; then let one rank leave a call alone."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(sharded(SmallGpt(blocks=1)))
    theirs, ours = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    step = memplan.compile_step(ours, optimizers[1], energy, tokens(rank(), 0), arena_budget="min", policy="recompute")
    losses: list[float] = []
    expected: list[float] = []
    for i, rows in enumerate((2, 8, 2)):
        losses.append(step(tokens(rank(), i, rows=rows)).item())
        expected += eager(theirs, optimizers[0], partial(_batch_of, i, rows), steps=1)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    sequences = [[c.line for c in one.program.plan.collectives] for one in step._builder.plans]
    found: dict[str, Any] = {
        "alike": losses == expected and all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs),
        "several": any(other != sequences[0] for other in sequences),
    }
    alone: Any
    _, _, alone = compiled(on_mismatch="error")
    batch = vectors(rank(), 0, rows=3 if rank() == 1 else 4)
    found["leaves"] = raised(lambda: within(1, lambda: alone(batch)) if rank() == 1 else alone(batch))
    found["left"] = raised(lambda: alone(vectors(rank(), 0)))
    found["compiled later"] = raised(compiled)
    return found


def _batch_of(number: int, rows: int, rank: int, _: int) -> torch.Tensor:
    return tokens(rank, number, rows=rows)


def _dying_at_the_third_reduction() -> Callable[[Any], None]:
    """Return a hook that kills rank 1."""
    seen: list[str] = []

    def hook(event: Any) -> None:
        if event.when == "start" and "reduce_scatter" in event.target:
            seen.append(event.op)
            if len(seen) == 3 and rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook
