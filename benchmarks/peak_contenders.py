"""The ways to run a step whose peaks `benchmarks.peak` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch._functorch import config as functorch_config

import memplan
from benchmarks.checkpointing import checkpoint_blocks
from memplan.core.plan import Plan

Mode = Literal["training", "inference"]
BUDGETS = ("80", "60", "50", "40", "30", "min")  # percent of eager's predicted total
POLICIES = ("recompute", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that is ready to run, and what its contender predicts.

    `run` does one step from empty gradients: forward and backward, or the forward alone for inference. `clear` empties
    the gradients. `plan` is memplan's plan. `how` says how blocks were checkpointed.
    """

    run: Callable[[], object]
    clear: Callable[[], None]
    plan: Plan | None = None
    how: str | None = None


Call = Callable[..., Any]
Compile = Callable[[nn.Module, tuple[Any, ...], Mode], tuple[Call, Plan | None]]


def eager(model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> tuple[Call, None]:
    """PyTorch as it is."""
    return model, None


def inductor(
    model: nn.Module, inputs: tuple[Any, ...], mode: Mode, *, activation_memory_budget: float | None = None
) -> tuple[Call, None]:
    """`torch.compile` with its default backend. The memory budget is set for the whole process, which is its own."""
    if activation_memory_budget is not None:
        functorch_config.activation_memory_budget = activation_memory_budget
    return torch.compile(model, fullgraph=True), None


def planned(model: nn.Module, inputs: tuple[Any, ...], mode: Mode, **options: Any) -> tuple[Call, Plan]:
    """`memplan.compile`."""
    compiled = memplan.compile(model, inputs, train=mode == "training", **options)
    return compiled, compiled.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to run a step: how the model is compiled, and whether its blocks are checkpointed before.

    `modes` are those in which it differs from the other contenders.
    """

    compile: Compile
    checkpointed: bool = False
    modes: tuple[Mode, ...] = ("training",)

    def step(self, model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> Step:
        """Return the step of `model`, which is put into training or evaluation mode, ready to run."""
        model.train(model.training and mode == "training")
        how = checkpoint_blocks(model) if self.checkpointed else None
        call, plan = self.compile(model, inputs, mode)
        parameters = list(model.parameters())

        def clear() -> None:
            for parameter in parameters:
                parameter.grad = None

        def train() -> object:
            clear()
            loss = call(*inputs)
            loss.backward()
            return loss

        def infer() -> object:
            with torch.no_grad():
                return call(*inputs)

        return Step(run=train if mode == "training" else infer, clear=clear, plan=plan, how=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A whole training step with fused AdamW: forward, backward and update, by eager or by one program of memplan."""

    planned: bool
    modes: tuple[Mode, ...] = ("training",)

    def step(self, model: nn.Module, inputs: tuple[Any, ...], mode: Mode) -> Step:
        """Return the step of `model`, which is in training mode, ready to run."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def clear() -> None:
            optimizer.zero_grad(set_to_none=True)

        if self.planned:
            compiled = memplan.compile_step(model, optimizer, lambda loss: loss, inputs)
            return Step(run=lambda: compiled(*inputs), clear=clear, plan=compiled.plan)

        def train() -> object:
            clear()
            loss = model(*inputs)
            loss.backward()
            optimizer.step()
            return loss

        return Step(run=train, clear=clear)


def limit_of(plan: Plan) -> int | None:
    """Return the bytes that a plan's total may have; None without such a limit."""
    return None if plan.eviction is None else plan.eviction.budget


def _budgeted(budget: str, policy: str) -> Contender:
    asked = budget if budget == "min" else f"{budget}%"
    return Contender(compile=partial(planned, budget=asked, policy=policy))


_BOTH: tuple[Mode, ...] = ("training", "inference")
CONTENDERS: Mapping[str, Contender | WholeStep] = MappingProxyType(
    {
        "eager": Contender(compile=eager, modes=_BOTH),
        "eager+checkpoint": Contender(compile=eager, checkpointed=True),
        "inductor": Contender(compile=inductor, modes=_BOTH),
        "inductor+checkpoint": Contender(compile=inductor, checkpointed=True),
        **{
            f"inductor-{share}": Contender(compile=partial(inductor, activation_memory_budget=share))
            for share in (0.5, 0.25, 0.1)
        },
        "memplan": Contender(compile=planned, modes=_BOTH),
        "memplan-outside": Contender(compile=partial(planned, gradients="outside")),
        "memplan-arena": Contender(compile=partial(planned, gradients="arena")),
        "memplan+checkpoint": Contender(compile=planned, checkpointed=True),
        "eager-step": WholeStep(planned=False),
        "memplan-step": WholeStep(planned=True),
        **{f"memplan-{budget}-{policy}": _budgeted(budget, policy) for policy in POLICIES for budget in BUDGETS},
    }
)
