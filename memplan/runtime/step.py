"""The one link between a program and autograd: forward and backward of a step as a single autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.errors import StaleActivationsError, UnsupportedCall
from memplan.runtime.ledger import InFlight


class PlannedStep(torch.autograd.Function):
    """Parameters are inputs, so that their gradients arrive; what the backward reads may not change in between."""

    @staticmethod
    def forward(ctx: Any, runner: Any, inputs: Sequence[torch.Tensor], *differentiable: torch.Tensor) -> Any:
        step = runner.arena.ledger.begin(keep=True)
        fresh, saved = runner.program.forward(*inputs)
        ctx.runner, ctx.step = runner, step
        # An output saved as itself would keep its own graph alive for ever.
        outputs = runner.program.saved_outputs
        ctx.saved = [t.detach() if output else t for t, output in zip(saved, outputs, strict=True)]
        ctx.versions = [t._version for t in ctx.saved], [t._version for t in runner.watched()]
        if None in runner.tangents:
            ctx.mark_non_differentiable(*(t for t, dual in zip(fresh, runner.tangents, strict=True) if dual is None))
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner, step = ctx.runner, ctx.step
        if torch.is_grad_enabled():
            raise UnsupportedCall(
                "a planned step has no second derivative (create_graph=True)",
                hint="run this step on the original model",
            )
        runner.arena.ledger.end(step)
        saved, ctx.saved = ctx.saved, None
        _require_unchanged(ctx.versions, saved, runner.watched(), step)
        gradients = runner.program.backward(*saved, *runner.tangents_from(grads))
        return (None, None, *runner.in_order(gradients))


def _require_unchanged(
    versions: tuple[list[int], list[int]],
    saved: Sequence[torch.Tensor],
    watched: Sequence[torch.Tensor],
    step: InFlight,
) -> None:
    if versions == ([t._version for t in saved], [t._version for t in watched]):
        return
    pairs = zip((*saved, *watched), (*versions[0], *versions[1]), strict=True)
    changed = next(t for t, version in pairs if t._version != version)
    raise StaleActivationsError(
        f"a tensor of shape {tuple(changed.shape)} (an input, an output or a parameter) that the backward of "
        f"forward {step.number} needs was changed in place after the forward",
        hint="change it after the backward, or change a copy",
    )
