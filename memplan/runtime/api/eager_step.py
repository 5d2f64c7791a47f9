"""Runs a whole training step that has no plan eagerly.

It serves `compile_step` with `on_mismatch="eager"` and `"passive"`, and calls that get no plan (beyond the 8 plans, or
where planning fails) with `"replan"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.errors import UnsupportedCall
from memplan.runtime.execute.optimizer_state import StepGuards


def eager_step(
    module_guards: StepGuards,
    run: Callable[..., Any],
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    accumulate: int,
    update: bool,
    clip_grad_norm: float | None,
) -> torch.Tensor:
    """Run forward, backward and, if `update`, the optimizer's step; return the loss of the batch, detached.

    `run(model, *batch, **kwargs)` calls the model. `.grad` is not changed; with `accumulate`, gradients are added to
    the sums that the planned step keeps. Raises `UnsupportedCall` for a gradient that has no such sum.
    """
    optimizer = module_guards.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    everyone = {*parameters, *module_guards.model.parameters()}
    before = {p: p.grad for p in everyone}
    try:
        for p in everyone:
            p.grad = None
        with torch.enable_grad():
            loss = run(module_guards.model, *batch, **kwargs)
            loss.backward(torch.full_like(loss, 1 / accumulate))
        if accumulate > 1:
            _accumulate(module_guards, parameters)
        if update:
            if clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
            optimizer.step()
            for total in module_guards.accumulated().values():
                total.zero_()
    finally:
        for p, grad in before.items():
            p.grad = grad
    result: torch.Tensor = loss.detach()
    return result


def _accumulate(module_guards: StepGuards, parameters: list[torch.Tensor]) -> None:
    """Add the gradients to the sums of earlier calls, and set these as `.grad` of the parameters."""
    totals = module_guards.accumulated()
    for p in parameters:
        total = totals.get(p)
        if p.grad is not None and total is None:
            what = f"a parameter of shape {tuple(p.shape)} has a gradient, and had none when the step was compiled"
            raise UnsupportedCall(
                what,
                where=f"{len(totals)} gradients accumulate",
                hint="compile the step again",
                see="gradient-appeared",
            )
        if total is not None:
            with torch.no_grad():
                p.grad = total if p.grad is None else total.add_(p.grad)
