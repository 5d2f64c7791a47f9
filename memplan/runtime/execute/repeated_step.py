"""Repeats the forward of a step for a second backward, after `backward(retain_graph=True)`.

The first backward uses the activations' bytes again. A second one runs the forward once more, from the same inputs with
the same random numbers; buffers stay as they are. A step that nobody repeats holds weak references to its inputs, the
versions of what its backward does not read and, if it is random, the state of the generator.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from memplan.core.collectives import is_collective
from memplan.core.graph import Phase
from memplan.devices.generators import generators_of
from memplan.errors import StaleActivationsError
from memplan.runtime.memory.arena_ownership import ArenaOwnership, InFlight
from memplan.trace.traced import KernelCall, Ref, Source, TracedGraph

if TYPE_CHECKING:
    from memplan.runtime.execute.runner import Runner

_version = attrgetter("_version")
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
