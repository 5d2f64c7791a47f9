"""A step whose kernels Inductor generates: captured with Inductor's decompositions, and traced from its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._inductor.decomposition import select_decomp_table

from memplan.core.division import HEAD, NOTHING, SUMS_HINT, WITHOUT_SUMS, Division
from memplan.core.in_place import without_candidates
from memplan.core.timed import timed
from memplan.errors import UnsupportedGraph, UnsupportedProblem
from memplan.torch_inside.graphs import GradAOTOutput
from memplan.trace.capture.front_ends import quiet
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.fused.code_generation import Halves, generate
from memplan.trace.fused.early_gradients import EARLY
from memplan.trace.fused.environment import refused, require_inductor
from memplan.trace.fused.fused_graph import StepReader
from memplan.trace.fused.row_division import divide_rows
from memplan.trace.fused.updates import with_updates
from memplan.trace.graph.offload_target import with_host_residents
from memplan.trace.passes.own_outputs import returned_by, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import copy_of

if TYPE_CHECKING:
    from memplan.trace.traced import TracedGraph
    from memplan.trace.tracing import CapturedCall


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return Inductor's decompositions. Raises `UnsupportedDevice` if it cannot generate kernels here."""
    require_inductor()
    return select_decomp_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedStep:
    """A captured step with the code that Inductor generated for it.

    `captured` has the joint graph with write-backs, and `needs` is as in `Results`, by descriptor. `division`: as in
    `TracedGraph`.
    """

    captured: Captured
    halves: Halves
    needs: Mapping[Any, frozenset[int]]
    division: Division | None


def generated(captured: Captured, model: str, division: Division | None) -> GeneratedStep:
    """Return a captured step with Inductor's code, whose kernels are compiled when a program needs them.

    `division`: how to divide chains of rows. Raises `UnsupportedGraph` if Inductor cannot compile the graph, or memplan
    cannot plan the code.
    """
    joint = _copy(captured.graph_module)
    needs = tangents_needed(joint.graph)
    write_back_mutations(joint.graph, captured.alias_of)
    _, _, descs = returned_by(joint.graph)
    compiled = _copy(joint)
    settled = None if division is None else divide_rows(compiled.graph, division)
    if settled is not None and settled.over == NOTHING:
        compiled = _copy(joint)  # whose products are not trimmed for nothing
    if division is HEAD and not any(EARLY in node.meta for node in compiled.graph.nodes):
        what, hint = (
            "has no loss head whose gradients the forward can compute",
            "pass divide=memplan.Division(sums=True)",
        )
        raise UnsupportedGraph(model, what, hint, see="inductor-options")
    _erase_numbers(compiled.graph)
    with quiet():
        halves = generate(
            compiled,
            model,
            returned=sum(d is not None and not isinstance(d, GradAOTOutput) for d in descs),
            training=captured.training,
            in_blocks=settled is not None,
        )
    made = replace(captured, graph_module=joint)
    return GeneratedStep(captured=made, halves=halves, needs=needs, division=settled)


def _erase_numbers(graph: fx.Graph) -> None:
    """Erase inputs that are plain numbers, which tracing has taken for constants."""
    for node in graph.find_nodes(op="placeholder"):
        if "val" not in node.meta and not node.users:
            graph.erase_node(node)
    if any("val" not in node.meta for node in graph.find_nodes(op="placeholder")):
        raise refused("a number among its inputs")


def trace_generated(step: CapturedCall, division: Division | None, compress: str) -> TracedGraph:
    """Return a variant of a step (see `CapturedCall.retrace`) with Inductor's kernels, and torch's for an update.

    Raises `UnsupportedProblem` for a variant that generated kernels cannot have.
    """
    if division is not None and not division.sums:
        raise UnsupportedProblem(WITHOUT_SUMS, where="divide", hint=SUMS_HINT)
    if compress:
        what = "what generated kernels save cannot be compressed"
        raise UnsupportedProblem(what, where="compress", hint='take kernels="aten"')
    kept = {} if step.update is None else step.generated  # variants of an update share the code of forward and backward
    made = kept.get(division)
    if made is None:
        with timed(f"generating kernels of {step.model}"):
            made = kept[division] = generated(step.captured, step.model, division)
    captured = replace(made.captured, inputs=step.captured.inputs)
    traced = StepReader(captured, made.halves, step.model, made.needs).build(
        gradients_in_arena=step.options.gradients_in_arena,
        copy_gradients=step.options.copy_gradients,
        whole=step.update is not None,
    )
    traced = traced if step.update is None else with_updates(traced, captured, step.update)
    traced = traced if step.target is None else with_host_residents(traced, step.target)
    graph = traced.graph if step.options.in_place else without_candidates(traced.graph)
    return replace(traced, division=made.division, graph=graph)


def _copy(graph_module: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(graph_module, copy_of(graph_module.graph))
