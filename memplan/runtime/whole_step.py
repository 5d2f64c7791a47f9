"""`compile_step`: forward, loss, backward and the optimizer's update as one program in one arena."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memplan.errors import UnsupportedGraph
from memplan.plan import Plan
from memplan.runtime.arena import arena_for
from memplan.runtime.guards import redzone_of
from memplan.runtime.runner import Runner
from memplan.runtime.slots import StepStructure
from memplan.trace import alignment_of, plan_traced, trace_step


class Loss(nn.Module):
    """A model and its loss as one module: the loss is traced too, so no gradient of its inputs' size comes in."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.with_targets = _positional_arguments(loss_fn) > 1

    def forward(self, *batch: Any) -> torch.Tensor:
        if not self.with_targets:
            return self.loss_fn(self.model(*batch))
        inputs, targets = batch
        output = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        return self.loss_fn(output, *targets) if isinstance(targets, tuple) else self.loss_fn(output, targets)


class CompiledStep:
    """One training step. Made by `memplan.compile_step`; `step(*batch)` returns the loss, detached.

    The parameters and the optimizer's state are changed in place, as `optimizer.step()` would; gradients
    live and die in the arena, and `.grad` is left alone. `plan` is the plan that it runs.
    """

    plan: Plan

    def __init__(self, structure: StepStructure, runner: Runner) -> None:
        self.plan = runner.plan
        self._structure = structure
        self._runner = runner
        self._modes = structure.modes()

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Run a step. Raises `InputMismatch` rather than be silently wrong."""
        self._structure.require_modes(self._modes)
        loss = self._runner.whole_step(self._runner.signature.flatten(batch, {}))
        self._structure.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        return loss


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    example_batch: Any,
    *,
    clip_grad_norm: float | None = None,
    budget: Any = None,
    policy: Any = "auto",
    costs: Any = None,
    solver: Any = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    guard: str | None = None,
) -> CompiledStep:
    """Compile a whole training step: one call does forward, loss, backward and the optimizer's update.

    `loss_fn(model(*batch))` is computed when `loss_fn` takes one argument; otherwise the batch is
    `(inputs, targets)` and `loss_fn(model(inputs), targets)` is, tuples unpacked. `optimizer` is SGD, Adam or
    AdamW; it stays the owner of its state and hyperparameters, which are read at every step. Each parameter
    is updated as soon as its gradient exists and its old value has had its last reader; `clip_grad_norm`
    (the maximal global 2-norm) makes all updates wait for all gradients.

    Raises `UnsupportedGraph` for what cannot be traced or an optimizer whose update is not known.
    """
    batch = example_batch if isinstance(example_batch, tuple) else (example_batch,)
    loss = Loss(model, loss_fn)
    if loss.with_targets and len(batch) != 2:
        what = f"loss_fn takes several arguments, but the batch has {len(batch)} parts"
        raise UnsupportedGraph("example_batch", what, "pass (inputs, targets), or a loss_fn of one argument")
    traced = trace_step(loss, optimizer, batch, clip_grad_norm=clip_grad_norm, in_place=in_place)
    redzone = redzone_of(guard, alignment_of(traced.device))
    plan = plan_traced(
        traced, redzone=redzone, solver=solver, time_limit=time_limit, budget=budget, policy=policy, costs=costs
    )
    structure = StepStructure(loss, optimizer)
    return CompiledStep(structure, Runner(structure, traced, plan, arena_for(plan, traced.device), guard=guard))


def _positional_arguments(function: Callable[..., Any]) -> int:
    """How many positional arguments without defaults a function (or a module's forward) takes."""
    target = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(target).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)
