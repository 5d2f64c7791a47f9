"""Ways to run one training step, forward and backward, on the same model and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import memplan


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is ready to run.

    `run` does one forward and backward from empty gradients; `clear` empties them. `standing` is
    what it allocated beforehand for its intermediates, in bytes (an arena); `planned` is the predicted peak of
    everything, in bytes, where there is one. `kernels` calls the step's kernels and does nothing else, where
    they can be had apart; `pool` tells the bytes that CUDA graphs keep beside the arena.
    """

    run: Callable[[], object]
    clear: Callable[[], None]
    standing: int = 0
    planned: int | None = None
    kernels: Callable[[], object] | None = None
    pool: Callable[[], int] | None = None


Contender = Callable[[nn.Module, tuple[Any, ...]], Step]


def _step(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    **more: Any,
) -> Step:
    parameters = list(model.parameters())

    def clear() -> None:
        for parameter in parameters:
            parameter.grad = None

    def run() -> object:
        clear()
        loss = call(*inputs)
        loss.backward()
        return loss

    return Step(run=run, clear=clear, **more)


def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """PyTorch as it is."""
    return _step(model, model, inputs)


def torch_compile(backend: Any, model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`torch.compile` with a backend, one full graph."""
    return _step(model, torch.compile(model, backend=backend, fullgraph=True, **options), inputs)


def planned(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`memplan.compile`: every intermediate at its planned address."""
    compiled = memplan.compile(model, inputs, **options)
    runner = compiled._calls.selector.main
    tensors = runner.input_guards.tensors(runner.input_guards.flatten(inputs, {}))
    one, backward = torch.ones((), device=runner.traced.device), runner.program.backward
    assert backward is not None

    def kernels() -> None:
        fresh, saved = runner.program.forward(*tensors)
        backward(*saved, *(one.expand_as(t) for t in fresh))

    return _step(
        model,
        compiled,
        inputs,
        standing=compiled.plan.arena_size,
        planned=compiled.plan.total,
        kernels=kernels,
        pool=lambda: compiled.pool_bytes,
    )


def eager_step(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """PyTorch as it is, with the fused optimizer: forward, backward, update."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def run() -> object:
        optimizer.zero_grad()
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        return loss

    return Step(run=run, clear=optimizer.zero_grad)


def planned_step(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> Step:
    """`memplan.compile_step` with the same optimizer: forward, backward and updates in one arena."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memplan.compile_step(model, optimizer, _loss_itself, inputs, **options)
    planned = step.plan.total - step.plan.outside["optimizer state"]  # which no contender counts
    return Step(
        run=partial(step, *inputs),
        clear=optimizer.zero_grad,
        standing=step.plan.arena_size,
        planned=planned,
        pool=lambda: step.pool_bytes,
    )


def _loss_itself(loss: torch.Tensor) -> torch.Tensor:
    return loss


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": eager,
        "memplan": planned,
        "memplan-outside": partial(planned, gradients="outside"),
        "memplan-arena": partial(planned, gradients="arena"),
        "memplan-graph": partial(planned, cuda_graph=True),
        "memplan-backend": partial(torch_compile, memplan.Backend()),
        "eager-step": eager_step,
        "memplan-step": planned_step,
        "memplan-step-graph": partial(planned_step, cuda_graph=True),
        "aot_eager": partial(torch_compile, "aot_eager"),
        "inductor": partial(torch_compile, "inductor"),
        "inductor-graph": partial(torch_compile, "inductor", mode="reduce-overhead"),
    }
)
