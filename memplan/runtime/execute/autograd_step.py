"""Connects a program to autograd: forward and backward of a step are a single autograd node."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from memplan.core.collectives import is_collective
from memplan.core.graph import Phase
from memplan.devices.kinds import generators_of
from memplan.errors import StaleActivationsError, UnsupportedCall
from memplan.runtime.guards import refused_calls
from memplan.runtime.guards.module_guards import hooks_ever_set, hooks_on
from memplan.runtime.guards.refused_calls import in_ddp
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight
from memplan.runtime.memory.idle_arenas import end_step
from memplan.trace.traced import KernelCall, Ref, Source, TracedGraph

if TYPE_CHECKING:
    from memplan.runtime.execute.runner import Runner

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
                    ownership.left.append(inside)
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
    if refused_calls.active():
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


_RUNNING = ("running_mean", "running_var")  # arguments of batch norms that nothing else depends on while training


class Repeatable:
    """The inputs, versions and generators with which the forward of one step can run again.

    It is made before that forward, and completed by `ran`.
    """

    __slots__ = ("_current", "_inputs", "_kept", "_states", "_versions")

    def __init__(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> None:
        self._inputs = [weakref.ref(x) for x in inputs]
        self._states = _states(runner.traced.device) if runner.draws else None
        self._kept: list[torch.Tensor | None] | None = None

    def ran(self, runner: Runner, inputs: Sequence[torch.Tensor], current: Sequence[torch.Tensor]) -> None:
        """Store the versions of inputs, and of parameters that the backward does not read, after the forward."""
        self._current = runner.unwatched(current)
        self._versions = _versions((*inputs, *self._current))

    @property
    def kept(self) -> bool:
        """Whether a backward with `retain_graph=True` has run."""
        return self._kept is not None

    def keep(self) -> None:
        """Keep the inputs for another backward."""
        self._kept = [ref() for ref in self._inputs]

    def repeat(self, first: Runner, ownership: ArenaOwnership, step: InFlight) -> tuple[Runner, Sequence[torch.Tensor]]:
        """Run the forward again; return the program that ran it now, and what its backward takes.

        The program may have moved since the first time, when `first` ran. Raises `StaleActivationsError` if it cannot.
        """
        now_there: Runner | None = ownership.program_now(first)
        runner = first if now_there is None else now_there
        reason = runner.never_repeats
        if reason is None and now_there is None:
            reason = "its arena was freed, or is used by another call"
        if reason is None and not ownership.may_begin:
            reason = "other calls that wait for their backward hold its bytes"
        inputs = [x for x in self._kept or () if x is not None]
        if reason is None and len(inputs) < len(self._inputs):
            reason = "an input is gone, which was no longer needed"
        if reason is None and (self._versions is None or _versions((*inputs, *self._current)) != self._versions):
            reason = "an input or a parameter was changed in place since"
        current, unmoved = runner.parameter_guards.look()
        if reason is None and not unmoved:
            reason = "a parameter or buffer was replaced since"
        if reason is not None:
            raise StaleActivationsError(
                f"backward ran twice for forward {step.number}; its activations were released by the first, and its "
                f"forward cannot run again: {reason}",
                hint="run the forward again, or add the losses before one backward",
                see="backward-twice",
            )
        written = [t.data for t in runner.written(current)]
        ownership.repeat()
        runner.take_arena()
        before = [t.clone() for t in written]
        now = None if self._states is None else _states(runner.traced.device)
        try:
            if self._states is not None:
                _set_states(self._states, runner.traced.device)
            saved: Sequence[torch.Tensor] = runner.forward(*inputs)[1]
        finally:
            if now is not None:
                _set_states(now, runner.traced.device)
            for t, value in zip(written, before, strict=True):
                t.copy_(value)
        return runner, saved


def reason_against(traced: TracedGraph, order: Sequence[int], *, recorded: bool) -> str | None:
    """Return why a step can never be repeated; None if it can."""
    if recorded or traced.runs_on:
        return "the step is recorded" if recorded else "the step copies its parameters and inputs to a device"
    bound = [b for b in traced.bindings if b.written]
    if any(b.source is Source.INPUT for b in bound):
        return "it changes an input in place"
    graph = traced.graph
    if any(is_collective(op.target) for op in graph.ops):
        return "it has collectives, in which the other ranks would not take part"
    tainted = {graph.values[b.value].storage for b in bound}
    for i in order:
        op, kernel = graph.ops[i], traced.kernels[i]
        ignored = _running_statistics(kernel) if isinstance(kernel, KernelCall) else ()
        read = {graph.values[v].storage for v in op.reads if v not in ignored}
        if read.isdisjoint(tainted):
            continue
        if op.phase is Phase.BACKWARD:
            return "its gradients depend on the values that a buffer had before"
        tainted.update(graph.values[v].storage for v in op.writes)
    return None


def _running_statistics(kernel: KernelCall) -> set[int]:
    """Return the values of the running statistics that a batch norm only updates, because it is training."""
    names = [a.name for a in kernel.target._schema.arguments]
    given = {**dict(zip(names, kernel.args, strict=False)), **kernel.kwargs}
    if not given.get("training", given.get("train", False)):
        return set()
    return {x.value for name in _RUNNING if isinstance(x := given.get(name), Ref)}


def _versions(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the sum of the versions of tensors, which only grow; None if one of them, of inference mode, has none."""
    try:
        return int(sum(map(_version, tensors)))
    except RuntimeError:
        return None


def _states(device: torch.device) -> list[torch.Generator]:
    """Return copies of the generators that a step on `device` draws from, which take no memory of tensors."""
    return [generator.clone_state() for generator in generators_of(device)]


def _set_states(states: Sequence[torch.Generator], device: torch.device) -> None:
    for generator, state in zip(generators_of(device), states, strict=True):
        generator.set_state(state.get_state())
