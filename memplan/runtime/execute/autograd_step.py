"""Connects a program to autograd: forward and backward of a step are a single autograd node."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from memplan.core.graph import Phase
from memplan.errors import StaleActivationsError, UnsupportedCall
from memplan.runtime.execute.repeated_step import Repeatable
from memplan.runtime.guards import transforms
from memplan.runtime.guards.hook_counts import hooks_ever_set, hooks_on
from memplan.runtime.guards.ranks import in_ddp
from memplan.runtime.memory.arena_ownership import InFlight
from memplan.runtime.memory.idle_arenas import end_step

_version = attrgetter("_version")


class PlannedStep(torch.autograd.Function):
    """A step as an autograd node. Parameters are inputs, so that autograd accumulates their gradients.

    The backward raises if a tensor that it reads was changed in place after the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        runner: Any,
        inputs: Sequence[torch.Tensor],
        current: Sequence[torch.Tensor],
        *differentiable: torch.Tensor,
    ) -> Any:
        with runner.arena.ownership as ownership:
            step = ownership.begin(keep=True)
            try:
                runner.take_arena()
                ctx.repeatable = Repeatable(runner, inputs)
                fresh, saved = runner.forward(*inputs)
            except BaseException:
                step.done = True  # no backward can follow; a kept exception must not block the arena
                raise
        if runner.left_outside:
            step.leaves(runner.left_outside)
        increment_version(runner.changed(Phase.FORWARD, inputs, current))
        ctx.changes = runner.changed(Phase.BACKWARD, inputs, current)
        ctx.repeatable.ran(runner, inputs, current)
        # An output that is saved undetached would keep its own autograd graph alive for ever.
        if True in (outputs := runner.program.saved_outputs):
            saved = [t.detach() if output else t for t, output in zip(saved, outputs, strict=True)]
        ctx.saved = saved
        ctx.watched = [*ctx.saved, *runner.watched(current), *(fresh[i].detach() for i in runner.views_of_saved)]
        ctx.versions = list(map(_version, ctx.watched))
        ctx.runner, ctx.step = runner, step
        ctx.adds = runner.wanted(current) if runner.added is not None and not in_ddp() else None
        ctx.hooks_before = hooks_ever_set()
        ctx.set_materialize_grads(False)
        duals = runner.traced.results.tangents
        if None in duals:
            ctx.mark_non_differentiable(*(t for t, dual in zip(fresh, duals, strict=True) if dual is None))
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner, step = ctx.runner, ctx.step
        _require_supported()
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        with runner.arena.ownership as ownership:
            repeatable, watched = ctx.repeatable, ctx.watched
            repeats = step.done and repeatable is not None and repeatable.kept
            if not repeats:
                ownership.end(step)
            if list(map(_version, watched)) != ctx.versions:
                raise _changed(watched, ctx.versions, step)
            saved = ctx.saved
            if repeats:
                runner, saved = repeatable.repeat(runner, ownership, step)
            ctx.saved = None
            if keeps:
                repeatable.keep()
            else:
                ctx.watched, ctx.repeatable = None, None
            tangents, missing = runner.tangents.of(grads)
            increment_version(ctx.changes)
            targets = None if missing else _targets(ctx, runner, [*watched, *saved, *tangents])
            if targets is not None:
                gradients = runner.added.backward(*saved, *tangents, *targets)
                increment_version(targets)
                handed = [*[None] * len(targets), *runner.in_order(gradients, missing)[len(targets) :]]
            else:
                gradients = runner.backward(*saved, *tangents)
                if (inside := runner.arena_gradients) is not None and (keeps or inside.copied):
                    gradients = inside.copies(gradients)  # another backward will use the bytes, or something kept one
                elif inside is not None:
                    ownership.leave(inside)
                handed = runner.in_order(gradients, missing)
            end_step(runner.arena)
        return (None, None, None, *handed)


def _targets(ctx: Any, runner: Any, read: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the tensors to which a backward is to add the gradients of parameters; None if it returns them."""
    if ctx.adds is None or runner.is_observed or (hooks_ever_set() != ctx.hooks_before and hooks_on(ctx)):
        return None  # somebody is to see what it returns to autograd
    nodes = [node for node, _ in ctx.next_functions[: len(ctx.adds)]]
    targets: list[torch.Tensor] | None = runner.added.targets(ctx.adds, nodes, read)
    return targets


def _require_supported() -> None:
    """Raise `UnsupportedCall` for a backward that a planned step does not have."""
    if torch.is_grad_enabled():
        raise UnsupportedCall(
            "a planned step has no second derivative (create_graph=True)",
            hint="run this step on the original model",
            see="second-derivative",
        )
    if transforms.active():
        raise UnsupportedCall(
            "a planned step takes one gradient at a time (not several under vmap)",
            hint="run this step on the original model",
            see="one-gradient",
        )


# `apply` without the check of each argument for functorch wrappers, which the callers do
run_planned: Any = super(torch.autograd.Function, PlannedStep).apply


def _changed(watched: Sequence[torch.Tensor], versions: Sequence[int], step: InFlight) -> StaleActivationsError:
    tensor = next(t for t, version in zip(watched, versions, strict=True) if t._version != version)
    return StaleActivationsError(
        f"a tensor of shape {tuple(tensor.shape)} (an input, an output or a parameter) that the backward of "
        f"forward {step.number} needs was changed in place after the forward",
        hint="change it after the backward, or change a copy",
        see="changed-after-forward",
    )
