"""Trace a model into a `TracedGraph`: capture its graph, run the passes one after another, and read the result.

`capture_call` (of a model) and `CapturedLoss.step` of `whole_step.py` (of a training step) return a `CapturedStep`,
which planning can trace in several variants. `trace` does both at once for a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import fx, nn

from memplan.core.arguments import arguments_of
from memplan.core.choices import Kernels
from memplan.core.code_options import CodeOptions
from memplan.core.division import Division, compression_of
from memplan.core.in_place import with_inplace_candidates
from memplan.core.timed import timed
from memplan.distributed.parallelism import parallelism_of
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.capture.quiet import quiet
from memplan.trace.chunking.chunk import divide
from memplan.trace.collectives.parallel_graph import capture_parallel
from memplan.trace.compression.pack import pack_masks
from memplan.trace.compression.quantize import quantize
from memplan.trace.graph.build import build
from memplan.trace.graph.offload_target import Target, require_on_cpu, target_of, with_host_residents
from memplan.trace.lowering.rules import lower
from memplan.trace.passes.checkpoints import mark_checkpoints
from memplan.trace.passes.own_outputs import own_outputs, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import copy_of
from memplan.trace.passes.simplify import simplify
from memplan.trace.passes.sums import accumulate_in_place, write_in_place
from memplan.trace.retracer import Retracer
from memplan.trace.traced import TracedGraph

if TYPE_CHECKING:
    from memplan.planning.options import Device

_log = logging.getLogger("memplan")


class CapturedCall(Retracer, Protocol):
    """A captured call of a model, which can be traced in several variants."""

    @property
    def captured(self) -> Captured:
        """The graph that was captured."""

    def warn(self) -> None:
        """Log what the step computes unlike eager."""

    def first(self) -> TracedGraph:
        """Return the variant of the step to begin with."""


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    in_place: bool = True,
    device: Device | None = None,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
) -> TracedGraph:
    """Return one step of `model`, traced.

    Args:
        model: the module to trace; its parameters may be real, fake or meta tensors.
        example_inputs: a tuple of positional arguments, a dict of keywords, or the only argument.
        example_kwargs: keyword arguments.
        train: trace forward and backward (True) or the forward alone (False); None follows `model.training`.
        in_place: allow results to take the bytes of inputs that have their last use there (see
            `memplan.core.in_place`).
        device: where the step runs while the model and the caller stay on the CPU; None: where the model is.
        gradients_in_arena: parameters' gradients stay in the arena to the end of the step.
        copy_gradients: each gradient of a parameter is made in the arena and copied out as soon as it is complete.

    Raises:
        UnsupportedGraph: the model cannot be traced as one graph.
        UnsupportedDevice: `device` is not available, or the model is not on the CPU.
    """
    return capture_call(
        model,
        example_inputs,
        example_kwargs,
        train=train,
        in_place=in_place,
        device=device,
        gradients_in_arena=gradients_in_arena,
        copy_gradients=copy_gradients,
    ).first()


def capture_call(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    in_place: bool = True,
    device: Device | None = None,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
    kernels: Kernels = "aten",
) -> CapturedCall:
    """Return one step of `model`, captured. The arguments and errors are those of `trace`.

    `kernels`: what computes the ops ("inductor": kernels that Inductor generates, of which some change what they are
    given, whatever `in_place` says).
    """
    if kernels == "inductor":
        with quiet():
            from memplan.trace.fused.step import capture_fused  # imports Inductor

        return capture_fused(
            model,
            example_inputs,
            example_kwargs,
            train=train,
            in_place=in_place,
            gradients_in_arena=gradients_in_arena,
            copy_gradients=copy_gradients,
        )
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    train = bool(getattr(model, "training", True)) if train is None else train
    captured, target = captured_for(device, model, args, kwargs, train=train)
    return CapturedStep(
        captured=captured,
        model=type(model).__name__,
        finish=partial(own_outputs, copy_gradients=copy_gradients),
        target=target,
        in_place=in_place,
        gradients_in_arena=gradients_in_arena,
    )


def captured_for(
    device: Device | None, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> tuple[Captured, Target | None]:
    """Return the graph captured for `device` (None: for where the model is), and the target that stands for it."""
    with timed(f"tracing {type(model).__name__}"):
        if device is None:
            parallelism = parallelism_of(model)
            if parallelism is not None:
                return capture_parallel(model, parallelism, args, kwargs, train=train), None
            return capture(model, args, kwargs, train=train), None
        target = target_of(device)
        require_on_cpu(model, (args, kwargs))
        return capture(model, args, kwargs, train=train, device=target.device), target


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A captured step: the `Retracer` of a call of a model, or of a whole training step.

    `captured`: the graph, which is never changed. `model`: the name of the model. `finish`: the last pass. `target`:
    the device where the step runs while its model stays on the host (None: where the model is). `in_place`: results may
    take the bytes of inputs. `gradients_in_arena`: parameters' gradients stay in the arena.
    """

    captured: Captured
    model: str
    finish: Callable[[fx.Graph], None]
    target: Target | None
    in_place: bool
    gradients_in_arena: bool = False

    def warn(self) -> None:
        """Log what the step computes unlike eager."""
        _warn(self.captured, self.model)

    def first(self) -> TracedGraph:
        """Return the step as it is, undivided."""
        return self.retrace()

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        """Return the step, traced from a copy of its graph; see `Retracer`. Nothing generates its kernels (`code`)."""
        copied = fx.GraphModule(self.captured.graph_module, copy_of(self.captured.graph_module.graph))
        traced = trace_captured(
            replace(self.captured, graph_module=copied),
            self.model,
            self.finish,
            division,
            compress,
            gradients_in_arena=self.gradients_in_arena,
        )
        return _finished(traced, self.target, in_place=self.in_place)


def _finished(traced: TracedGraph, target: Target | None, *, in_place: bool) -> TracedGraph:
    """Return `traced` with its model on the host where `target` asks for that, and with its candidates for in-place
    reuse.
    """
    traced = traced if target is None else with_host_residents(traced, target)
    return replace(traced, graph=with_inplace_candidates(traced.graph)) if in_place else traced


def trace_graph(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    train: bool,
    in_place: bool = True,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
    kernels: Kernels = "aten",
) -> TracedGraph:
    """Trace a graph that dynamo made from a part of a model, wrapped as a module that holds its parameters."""
    if kernels == "inductor":
        with quiet():
            from memplan.trace.fused.step import trace_fused_graph  # imports Inductor

        return trace_fused_graph(
            module,
            inputs,
            train=train,
            in_place=in_place,
            gradients_in_arena=gradients_in_arena,
            copy_gradients=copy_gradients,
        )
    captured = capture(module, inputs, {}, train=train, by_dynamo=True)
    name = type(module).__name__
    _warn(captured, name)
    finish = partial(own_outputs, copy_gradients=copy_gradients)
    traced = trace_captured(captured, name, finish, gradients_in_arena=gradients_in_arena)
    return _finished(traced, None, in_place=in_place)


def _warn(captured: Captured, model: str) -> None:
    """Log what a captured graph computes unlike eager."""
    for warning in captured.warnings:
        _log.warning("%s: %s", model, warning)


def trace_captured(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None] = own_outputs,
    division: Division | None = None,
    compress: str = "",
    *,
    gradients_in_arena: bool = False,
) -> TracedGraph:
    """Run the passes over a captured graph (which they change) and read it.

    `finish` is the last pass. `division` and `compress`: how to divide chains of rows, and how to compress saved
    activations. `gradients_in_arena`: parameters' gradients stay there to the end of the step.
    """
    graph = captured.graph_module.graph
    needs = tangents_needed(graph)
    mark_checkpoints(graph)
    write_back_mutations(graph, captured.alias_of, at_once=True)
    simplify(graph)
    made = None if division is None else divide(graph, division)
    if compression_of(compress):
        pack_masks(graph)
    if compress == "int8":
        quantize(graph)
    lower(graph)
    write_in_place(graph)
    accumulate_in_place(graph)
    finish(graph)
    return replace(
        build(captured, model, needs, gradients_in_arena=gradients_in_arena), division=made, compress=compress
    )
