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
    everything, in bytes, where there is one.
    """

    run: Callable[[], object]
    clear: Callable[[], None]
    standing: int = 0
    planned: int | None = None


Contender = Callable[[nn.Module, tuple[Any, ...]], Step]


def _step(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    standing: int = 0,
    planned: int | None = None,
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

    return Step(run=run, clear=clear, standing=standing, planned=planned)


def eager(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """PyTorch as it is."""
    return _step(model, model, inputs)


def torch_compile(backend: str, model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """`torch.compile` with a backend, one full graph."""
    return _step(model, torch.compile(model, backend=backend, fullgraph=True), inputs)


def planned(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """`memplan.compile`: every intermediate at its planned address."""
    compiled = memplan.compile(model, inputs)
    return _step(model, compiled, inputs, standing=compiled.plan.arena_size, planned=compiled.plan.total)


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


def planned_step(model: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """`memplan.compile_step` with the same optimizer: forward, backward and updates in one arena."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memplan.compile_step(model, optimizer, _loss_itself, inputs)
    planned = step.plan.total - step.plan.outside["optimizer state"]  # which no contender counts
    return Step(run=partial(step, *inputs), clear=optimizer.zero_grad, standing=step.plan.arena_size, planned=planned)


def _loss_itself(loss: torch.Tensor) -> torch.Tensor:
    return loss


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": eager,
        "memplan": planned,
        "eager-step": eager_step,
        "memplan-step": planned_step,
        "aot_eager": partial(torch_compile, "aot_eager"),
        "inductor": partial(torch_compile, "inductor"),
    }
)
