"""Connects a program to autograd: forward and backward of a step are a single autograd node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import increment_version

from memplan.core.graph import Phase
from memplan.errors import StaleActivationsError, UnsupportedCall
from memplan.runtime.execute.held_gradients import note_held_by_autograd_alone, note_unshared
from memplan.runtime.execute.repeated_step import Repeatable
from memplan.runtime.guards import transforms
from memplan.runtime.guards.hook_counts import hooks_ever_set, hooks_on
from memplan.runtime.guards.ranks import in_ddp
from memplan.runtime.memory.arena_ownership import InFlight
from memplan.runtime.memory.handed_gradients import HandedGradients

_version = attrgetter("_version")


class PlannedStep(torch.autograd.Function):
    """A step as an autograd node. Parameters are inputs, so that autograd accumulates their gradients.

    The backward raises if a tensor that it reads was changed in place after the forward. `is_planned` tells nodes of
    planned steps from others in autograd's graph.
    """

    is_planned = True

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
            runner.take_arena()
            ctx.repeatable = Repeatable(runner, inputs)
            try:
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
        if not runner.caller.is_done:
            runner.caller.forward_ended(fresh, runner.wanted(current))
            ownership.note_passed(inputs, fresh)
        duals = runner.traced.results.tangents
        if None in duals:
            ctx.mark_non_differentiable(*(t for t, dual in zip(fresh, duals, strict=True) if dual is None))
        return fresh

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner, step = ctx.runner, ctx.step
        _require_supported()
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        if not (keeps or runner.caller.is_done):  # a graph that is kept is not freed by what ran of it
            runner.caller.backward_begins(ctx, grads)
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
            note_held_by_autograd_alone(runner.dropped, grads)
            outputs = () if keeps or repeats else compress(saved, runner.program.saved_outputs)
            note_unshared(runner.dropped, outputs)
            tangents, missing = runner.tangents.of(grads)
            increment_version(ctx.changes)
            if (handing := _handing(ctx, runner, [*watched, *saved, *tangents])) is not None:
                return (None, None, None, *_handed_over(handing, runner, [*saved, *tangents], missing))
            targets = None if missing else _targets(ctx, runner, ownership.handed, [*watched, *saved, *tangents])
            if targets is not None:
                gradients = runner.added.backward(*saved, *tangents, *targets)
                increment_version(targets)
                rest = runner.in_order(gradients, missing)[len(targets) :]
                return (None, None, None, *[None] * len(targets), *rest)
            gradients = runner.backward(*saved, *tangents)
            if runner.arena_gradients is not None and keeps:
                gradients = runner.arena_gradients.copies(gradients)  # another backward will use the bytes
            elif runner.arena_gradients is not None:
                ownership.leave(runner.arena_gradients)
            handed = runner.in_order(gradients, missing)
            if ctx.adds is not None:
                ownership.hand_over(ctx.adds, handed)
        return (None, None, None, *handed)


def _targets(
    ctx: Any, runner: Any, handed: HandedGradients | None, read: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return the tensors to which a backward is to add the gradients of parameters; None if it returns them."""
    if not _may_add(ctx, runner):
        return None
    nodes = [node for node, _ in ctx.next_functions[: len(ctx.adds)]]
    targets: list[torch.Tensor] | None = runner.added.targets(ctx.adds, nodes, read)
    if targets is None and handed is not None:
        targets = runner.added.waiting(ctx.adds, handed.waiting(ctx.adds))
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


def _may_add(ctx: Any, runner: Any) -> bool:
    """Return whether the backward may add gradients itself: nobody is to see what it returns to autograd."""
    if ctx.adds is None or runner.is_observed:
        return False
    return hooks_ever_set() == ctx.hooks_before or not hooks_on(ctx)


def _handing(ctx: Any, runner: Any, read: Sequence[torch.Tensor]) -> Any:
    """Return the backward that hands gradients to parameters with hooks when they are made; None without such hooks."""
    if not (ctx.adds and any(p._post_accumulate_grad_hooks for p in ctx.adds) and _may_add(ctx, runner)):
        return None
    nodes = [node for node, _ in ctx.next_functions[: len(ctx.adds)]]
    return runner.added.handing(runner.program, ctx.adds, nodes, read)


def _handed_over(
    handing: Any, runner: Any, given: Sequence[torch.Tensor], missing: set[int]
) -> list[torch.Tensor | None]:
    """Run a backward that hands gradients over; return those that autograd is to get, in order."""
    gradients, kept = handing(given, runner.without_gradient(missing))
    rest = runner.in_order(gradients, missing)[len(kept) :]
    return [*kept, *rest]


class OwningStep(PlannedStep):
    """A `PlannedStep` with one anchor instead of all parameters, whose gradients it assigns itself."""

    @staticmethod
    def forward(
        ctx: Any,
        runner: Any,
        inputs: Sequence[torch.Tensor],
        current: Sequence[torch.Tensor],
        *differentiable: torch.Tensor,
    ) -> Any:
        runner.owned.require_no_reducer()
        ctx.parameters = runner.wanted(current)
        return PlannedStep.forward(ctx, runner, inputs, current)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        runner, parameters = ctx.runner, ctx.parameters
        anchor = ctx.next_functions[0][0]
        wanted = torch._C._will_engine_execute_node(anchor)  # False in autograd.grad(loss, inputs)
        if wanted:
            runner.owned.require_no_hooks(parameters)
        gradients = PlannedStep.backward(ctx, *grads)[3:]
        if wanted:
            runner.owned.assign(parameters, gradients[: len(parameters)])
        return (None, None, None, None, *gradients[len(parameters) :])


def _unchecked_apply(step: type[PlannedStep]) -> Callable[..., Any]:
    """Return `apply` without the check of each argument for functorch wrappers, which the callers do."""
    return super(torch.autograd.Function, step).apply  # type: ignore[misc,no-any-return]


run_planned, run_owning = map(_unchecked_apply, (PlannedStep, OwningStep))


def _changed(watched: Sequence[torch.Tensor], versions: Sequence[int], step: InFlight) -> StaleActivationsError:
    tensor = next(t for t, version in zip(watched, versions, strict=True) if t._version != version)
    return StaleActivationsError(
        f"a tensor of shape {tuple(tensor.shape)} (an input, an output or a parameter) that the backward of "
        f"forward {step.number} needs was changed in place after the forward",
        hint="change it after the backward, or change a copy",
        see="changed-after-forward",
    )
