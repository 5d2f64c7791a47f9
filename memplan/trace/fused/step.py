"""A step whose kernels Inductor generates: captured with Inductor's decompositions, and traced from its code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, GradAOTOutput, ParamAOTInput
from torch._inductor.decomposition import select_decomp_table

from memplan.core.arguments import arguments_of
from memplan.core.code_options import CodeOptions
from memplan.core.division import SUMS_HINT, WITHOUT_SUMS, Division
from memplan.core.in_place import without_candidates
from memplan.core.timed import timed
from memplan.errors import UnsupportedProblem
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.capture.quiet import quiet
from memplan.trace.fused.code_generation import Halves, generate
from memplan.trace.fused.environment import require_inductor
from memplan.trace.fused.fused_graph import fused_graph
from memplan.trace.fused.layouts import first_code
from memplan.trace.fused.refusals import refused
from memplan.trace.fused.row_division import divide_rows
from memplan.trace.fused.updates import with_updates
from memplan.trace.passes.own_outputs import returned_by, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import copy_of

if TYPE_CHECKING:
    from memplan.trace.traced import TracedGraph

_log = logging.getLogger("memplan")


def capture_fused(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    in_place: bool = True,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
) -> FusedStep:
    """Return one step of `model`, captured for Inductor's kernels.

    Args:
        model: The module to trace.
        example_inputs: A tuple of positional arguments, a dict of keywords, or the only argument.
        example_kwargs: Keyword arguments.
        train: Trace forward and backward (True) or the forward alone (False); None follows `model.training`.
        in_place: Kernels may write over what has its last use there, where Inductor itself has not decided that.
        gradients_in_arena: Parameters' gradients stay in the arena to the end of the step.
        copy_gradients: Each gradient of a parameter is made in the arena and copied out as soon as it is complete.

    Raises:
        UnsupportedGraph: The model cannot be traced as one graph.
        UnsupportedDevice: Inductor cannot generate kernels here.
    """
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    train = bool(getattr(model, "training", True)) if train is None else train
    captured = capture_decomposed(model, args, kwargs, train=train)
    return FusedStep(
        captured=captured,
        model=model,
        in_place=in_place,
        gradients_in_arena=gradients_in_arena,
        copy_gradients=copy_gradients,
    )


def capture_decomposed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool, by_dynamo: bool = False
) -> Captured:
    """Return one step of `model`, captured with Inductor's decompositions; `by_dynamo` is as in `capture`.

    The errors are those of `capture_fused`.
    """
    require_inductor()
    table = select_decomp_table()
    return capture(model, args, kwargs, train=train, by_dynamo=by_dynamo, decompositions=table)


def trace_fused_graph(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    train: bool,
    in_place: bool = True,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
) -> TracedGraph:
    """Trace a graph that dynamo made from a part of a model; the arguments are those of `trace_graph`."""
    captured = capture_decomposed(module, inputs, {}, train=train, by_dynamo=True)
    step = FusedStep(
        captured=captured,
        model=module,
        in_place=in_place,
        gradients_in_arena=gradients_in_arena,
        copy_gradients=copy_gradients,
    )
    step.warn()
    return step.first()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedStep:
    """A captured step with the code that Inductor generated for it.

    `captured` has the joint graph with write-backs; `model` is the model's name, and `needs` is as in `Results`, by
    descriptor. `code`: how the code was generated; None: as Inductor does it by itself. `division`: as in
    `TracedGraph`.
    """

    captured: Captured
    halves: Halves
    model: str
    needs: Mapping[Any, frozenset[int]]
    code: CodeOptions | None
    division: Division | None = None


def generated(
    captured: Captured, model: str, code: CodeOptions | None = None, division: Division | None = None
) -> GeneratedStep:
    """Return a captured step with Inductor's code, whose kernels are compiled when a program needs them.

    `code`: how to generate it; None: as Inductor does by itself. `division`: how to divide chains of rows. Raises
    `UnsupportedGraph` if Inductor cannot compile the graph, or memplan cannot plan the code.
    """
    joint = _copy(captured.graph_module)
    needs = tangents_needed(joint.graph)
    write_back_mutations(joint.graph, captured.alias_of)
    _, _, descs = returned_by(joint.graph)
    compiled = _copy(joint)
    settled = None if division is None else divide_rows(compiled.graph, division)
    placeholders = _without_numbers(compiled.graph)
    static = [i for i, n in enumerate(placeholders) if isinstance(n.meta["desc"], (ParamAOTInput, BufferAOTInput))]
    with quiet():
        halves = generate(
            compiled,
            model,
            returned=sum(d is not None and not isinstance(d, GradAOTOutput) for d in descs),
            static=static,
            training=captured.training,
            code=code or CodeOptions(),
            in_blocks=settled is not None and settled.blocks != 1,
        )
    return GeneratedStep(
        captured=replace(captured, graph_module=joint),
        halves=halves,
        model=model,
        needs=needs,
        code=code,
        division=settled,
    )


def _without_numbers(graph: fx.Graph) -> Sequence[fx.Node]:
    """Erase inputs that are plain numbers, which tracing has taken for constants, and return the others."""
    for node in graph.find_nodes(op="placeholder"):
        if "val" not in node.meta and not node.users:
            graph.erase_node(node)
    left = graph.find_nodes(op="placeholder")
    if any("val" not in node.meta for node in left):
        raise refused("a number among its inputs")
    return left


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedStep:
    """A captured step, whose kernels Inductor generates: the `Retracer` of a call of a model.

    `in_place`, `gradients_in_arena` and `copy_gradients` are as in `capture_fused`.
    """

    captured: Captured
    model: nn.Module
    in_place: bool
    gradients_in_arena: bool
    copy_gradients: bool

    def warn(self) -> None:
        """Log what the step computes unlike eager."""
        for warning in self.captured.warnings:
            _log.warning("%s: %s", type(self.model).__name__, warning)

    def first(self) -> TracedGraph:
        """Return the step with the code that is taken where nothing else is asked for."""
        return self.retrace(code=first_code(self.captured.graph_module.graph))

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        """Return the step with Inductor's kernels, which are compiled when a program needs them."""
        _require_plain(division, compress)
        with timed(f"generating kernels of {type(self.model).__name__}"):
            made = generated(self.captured, type(self.model).__name__, code, division)
        step = fused_graph(
            made.captured,
            made.halves,
            made.model,
            made.needs,
            code=made.code,
            gradients_in_arena=self.gradients_in_arena,
            copy_gradients=self.copy_gradients,
        )
        return _finished(step, made.division, in_place=self.in_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedWholeStep:
    """A captured training step, whose kernels Inductor generates: the `Retracer` of a step with an optimizer's update.

    `generated` has the code that was generated first for `original`. `update` replaces the gradients that a
    graph returns by ops of the update. `in_place` is as in `capture_fused`.
    """

    original: Captured
    generated: GeneratedStep
    update: Callable[[fx.Graph], None]
    in_place: bool

    @property
    def captured(self) -> Captured:
        """The graph that was captured."""
        return self.generated.captured

    def warn(self) -> None:
        """Log what the step computes unlike eager."""
        for warning in self.captured.warnings:
            _log.warning("%s: %s", self.generated.model, warning)

    def first(self) -> TracedGraph:
        """Return the step with the code that was generated first."""
        return self.retrace(code=self.generated.code)

    def retrace(
        self, *, division: Division | None = None, compress: str = "", code: CodeOptions | None = None
    ) -> TracedGraph:
        """Return the step with Inductor's kernels, and torch's kernels for the update."""
        _require_plain(division, compress)
        made = self.generated
        if (code, division) != (made.code, made.division):
            made = generated(self.original, made.model, code, division)
        step = fused_graph(made.captured, made.halves, made.model, made.needs, code=code, whole=True)
        return _finished(with_updates(step, made.captured, self.update), made.division, in_place=self.in_place)


def _finished(step: TracedGraph, division: Division | None, *, in_place: bool) -> TracedGraph:
    """Return a step with the division that was made of it, and with candidates for in-place reuse if asked for."""
    graph = step.graph if in_place else without_candidates(step.graph)
    return replace(step, division=division, graph=graph)


def _require_plain(division: Division | None, compress: str) -> None:
    """Raise `UnsupportedProblem` for a variant of a step that generated kernels cannot have."""
    if division is not None and not division.sums:
        raise UnsupportedProblem(WITHOUT_SUMS, where="divide", hint=SUMS_HINT)
    if compress:
        what = "what generated kernels save cannot be compressed"
        raise UnsupportedProblem(what, where="compress", hint='take kernels="aten"')


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(graph_module, copy_of(graph_module.graph))
