"""Trace a model into a `TracedGraph`: capture its graph, run the passes one after another, and read the result.

`capture_call` is the one entry: for a model, for a loss with its backward (`whole_step.py` adds the updates), for one
rank of many, for a graph of dynamo's, and for each kind of kernels. It returns a `CapturedCall`, which planning can
trace in several variants. `trace` does both at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from memplan.core.arguments import arguments_of
from memplan.core.choices import Kernels, require_choices
from memplan.core.division import Division
from memplan.core.in_place import with_inplace_candidates
from memplan.core.timed import timed
from memplan.distributed.parallelism import parallelism_of
from memplan.errors import UnsupportedProblem
from memplan.trace.capture.checkpoints import mark_checkpoints
from memplan.trace.capture.front_ends import quiet
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.chunking.chunk import divide
from memplan.trace.collectives.parallel_graph import capture_parallel
from memplan.trace.graph.build import build
from memplan.trace.graph.offload_target import Target, require_on_cpu, target_of, with_host_residents
from memplan.trace.graph.values import AliasClasses
from memplan.trace.passes.compression import quantize
from memplan.trace.passes.lowering import lower
from memplan.trace.passes.nodes import allocate_at_end
from memplan.trace.passes.own_outputs import own_outputs, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import copy_of
from memplan.trace.passes.simplify import simplify, write_in_place
from memplan.trace.traced import TracedGraph

if TYPE_CHECKING:
    from memplan.planning.options import Device
    from memplan.trace.fused.step import GeneratedStep

_log = logging.getLogger("memplan")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of a capture: what is captured of a model, and what its trace is for.

    `train`: forward and backward (True) or the forward alone (False); None follows `model.training`. `kernels`: what
    computes the ops ("inductor": kernels that Inductor generates, of which some change what they are given, whatever
    `in_place` says). `device`: where the step runs while the model and the caller stay on the CPU; None: where the
    model is. `in_place`: results may take the bytes of inputs that have their last use there (see
    `memplan.core.in_place`). `gradients_in_arena`: parameters' gradients stay in the arena to the end of the step.
    `copy_gradients`: each gradient of a parameter is made in the arena and copied out as soon as it is complete.
    `by_dynamo`: the model is one of dynamo's own graphs, wrapped as a module that holds its parameters. `after`: the
    bytes that an optimizer allocates while the gradients are there; they are not known of a step of Inductor's kernels.
    """

    train: bool | None = None
    kernels: Kernels | None = None
    device: Device | None = None
    in_place: bool = True
    gradients_in_arena: bool = False
    copy_gradients: bool = False
    by_dynamo: bool = False
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCall:
    """A captured call of a model, or a captured training step, which can be traced in several variants.

    A variant of a step computes the same by other ops. `captured`: the graph, which is never changed. `model`: the name
    of the model. `target`: the device where the step runs while its model stays on the host (None: where the model is).
    `update`: replaces the gradients that a graph returns by ops of an optimizer; None: they are returned. `state`: the
    bytes that the optimizer keeps. `generated`: the code that Inductor has generated for variants of an update, by
    division.
    """

    captured: Captured
    model: str
    options: CaptureOptions
    target: Target | None = None
    update: Callable[[fx.Graph], None] | None = None
    state: int = 0
    generated: dict[Any, GeneratedStep] = field(default_factory=dict, repr=False)

    def warn(self) -> None:
        """Log what the step computes unlike eager."""
        for warning in self.captured.warnings:
            _log.warning("%s: %s", self.model, warning)

    def retrace(self, *, division: Division | None = None, compress: str = "") -> TracedGraph:
        """Return one variant of the step, traced from a copy of its graph.

        Args:
            division: How chains of rows are divided into blocks; None: not at all.
            compress: How saved activations are compressed ("int8"); "": not at all.
        """
        if self.options.kernels == "inductor":
            from memplan.trace.fused.step import trace_generated

            return trace_generated(self, division, compress)
        copied = fx.GraphModule(self.captured.graph_module, copy_of(self.captured.graph_module.graph))
        traced = trace_captured(
            replace(self.captured, graph_module=copied),
            self.model,
            self.update or partial(_finish, options=self.options),
            division,
            compress,
            gradients_in_arena=self.options.gradients_in_arena,
        )
        traced = traced if self.target is None else with_host_residents(traced, self.target)
        return replace(traced, graph=with_inplace_candidates(traced.graph)) if self.options.in_place else traced


def _finish(graph: fx.Graph, *, options: CaptureOptions) -> None:
    own_outputs(graph, copy_gradients=options.copy_gradients)
    allocate_at_end(graph, options.after)


def trace(
    model: nn.Module, example_inputs: Any = (), example_kwargs: dict[str, Any] | None = None, **options: Any
) -> TracedGraph:
    """Return one step of `model`, traced; the arguments and errors are those of `capture_call`."""
    return capture_call(model, example_inputs, example_kwargs, **options).retrace()


def capture_call(
    model: nn.Module, example_inputs: Any = (), example_kwargs: dict[str, Any] | None = None, **options: Any
) -> CapturedCall:
    """Return one step of `model`, captured.

    Args:
        model: The module to trace; its parameters may be real, fake or meta tensors.
        example_inputs: A tuple of positional arguments, a dict of keywords, or the only argument.
        example_kwargs: Keyword arguments.
        **options: Those of `CaptureOptions`.

    Raises:
        UnsupportedGraph: The model cannot be traced as one graph.
        UnsupportedDevice: `device` is not available, or the model is not on the CPU; or Inductor cannot generate
            kernels here.
    """
    asked = CaptureOptions(**options)
    require_choices(asked)
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    train = bool(getattr(model, "training", True)) if asked.train is None else asked.train
    name, table, parallelism = type(model).__name__, None, None
    target = None if asked.device is None else target_of(asked.device)
    if target is not None:
        require_on_cpu(model, (args, kwargs))
    with timed(f"tracing {name}"):
        if asked.kernels == "inductor":
            with quiet():
                from memplan.trace.fused.step import decompositions  # imports Inductor

            table = decompositions()
        elif not asked.by_dynamo and target is None:
            parallelism = parallelism_of(model)
        if parallelism is not None:
            captured = capture_parallel(model, parallelism, args, kwargs, train=train)
        else:
            device = None if target is None else target.device
            how: dict[str, Any] = {"by_dynamo": asked.by_dynamo, "device": device, "decompositions": table}
            captured = capture(model, args, kwargs, train=train, **how)
    return CapturedCall(captured=captured, model=name, options=asked, target=target)


def trace_captured(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None] = own_outputs,
    division: Division | None = None,
    compress: str = "",
    *,
    gradients_in_arena: bool = False,
    alias_classes: AliasClasses | None = None,
) -> TracedGraph:
    """Run the passes over a captured graph (which they change) and read it.

    `finish` is the last pass. `division` and `compress`: how to divide chains of rows, and how to compress saved
    activations. `gradients_in_arena`: parameters' gradients stay there to the end of the step. `alias_classes`:
    as in `build`, for sizes that are symbols.
    """
    graph = captured.graph_module.graph
    needs = tangents_needed(graph)
    mark_checkpoints(graph)
    write_back_mutations(graph, captured.alias_of, at_once=True)
    if alias_classes is None:
        simplify(graph)
    made = None if division is None else divide(graph, division)
    if compress:
        quantize(graph)
    lower(graph)
    write_in_place(graph)
    finish(graph)
    return replace(
        build(captured, model, needs, alias_classes, gradients_in_arena=gradients_in_arena),
        division=made,
        compress=compress,
    )


def retraced(
    traced: TracedGraph,
    retracer: CapturedCall | None,
    division: Division | None,
    compress: str,
) -> TracedGraph:
    """Return this variant of a step: `traced` itself if that is the one, else what `retracer` makes.

    Raises `UnsupportedProblem` if that needs a retracer and there is none.
    """
    if (division, compress) == (traced.division, traced.compress):
        return traced
    if retracer is None:
        where = "divide" if division != traced.division else "compress"
        raise UnsupportedProblem("this step cannot be traced again", where=where, hint=f"leave out {where}=")
    return retracer.retrace(division=division, compress=compress)
