"""Measure torch's own `activation_memory_budget` on a model: real peaks and seconds, to compare plans with.

The knob is a share of the activations that the min-cut partitioner would save, not a peak, and neither peak nor seconds
are monotone in it. Here the partitioner runs on the captured graph. The forward and backward graphs that it makes,
recomputes included, are then simulated as one sequence of events, by the same rules and costs as every plan.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from memplan.core.graph import Phase
from memplan.core.in_place import with_inplace_candidates
from memplan.core.totals import outside_bytes
from memplan.evict.costs import CostModel
from memplan.evict.measure import measure
from memplan.evict.workload import Event, Events, Kind, Workload
from memplan.planning.fit import make_workload
from memplan.torch_inside.graphs import BufferAOTInput, GradAOTOutput, ParamAOTInput
from memplan.trace.capture.front_ends import quiet
from memplan.trace.capture.joint_graph import Captured, capture
from memplan.trace.graph.build import build
from memplan.trace.passes.own_outputs import own_outputs, returned_by, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import fake_mode_of

BUDGETS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPoint:
    """One value of the knob (`asked`), the peak of the step's live bytes, its total bytes, and its seconds.

    `total` adds what the total of a plan adds to its arena: the model, its inputs, and the caller's results.
    `overhead` is relative to the same step without recomputes. Even 1.0 recomputes some ops: those that the partitioner
    expects its compiler to fuse. They are charged as the separate kernels that they are here.
    """

    asked: float
    peak: int
    total: int
    seconds: float
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPartition:
    """The forward and backward graph for one value of the knob, and the joint graph as the partitioner cleaned it."""

    asked: float
    captured: Captured
    graphs: tuple[fx.Graph, fx.Graph]


def torch_points(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    costs: CostModel,
    alignment: int,
    *,
    budgets: Sequence[float] = BUDGETS,
) -> tuple[TorchPoint, ...]:
    """Return a point for each of `budgets`, in their order; peaks count sizes rounded up to `alignment` bytes.

    Raises `UnsupportedGraph` as tracing does.
    """
    return points_of(partitions(capture(model, args, kwargs or {}, train=True), budgets), costs, alignment)


def partitions(captured: Captured, budgets: Sequence[float] = BUDGETS) -> tuple[TorchPartition, ...]:
    """Return the partitioner's graphs for each of `budgets`. `captured` has a backward, and is left as it is."""
    found = []
    for asked in budgets:
        joint = _copied(captured.graph_module)
        forward, backward = _partitioned(joint, asked)
        found.append(
            TorchPartition(asked=asked, captured=replace(captured, graph_module=joint), graphs=(forward, backward))
        )
    return tuple(found)


def points_of(
    found: Sequence[TorchPartition], costs: CostModel, alignment: int, *, in_place: bool = False
) -> tuple[TorchPoint, ...]:
    """Return the point of each partition. `in_place`: let results take the bytes of dying inputs, as memplan does."""
    points = []
    for one, workload, events in events_of(found, costs, alignment, in_place=in_place):
        figures, plain = measure(workload, events), sum(workload.seconds)
        overhead = figures.seconds / plain - 1 if plain else 0.0
        graph = workload.graph
        outside = outside_bytes(graph, tuple(range(len(graph.ops))), [0] * len(graph.ops))
        points.append(
            TorchPoint(
                asked=one.asked,
                peak=figures.peak,
                total=figures.peak + outside,
                seconds=figures.seconds,
                overhead=overhead,
            )
        )
    return tuple(points)


def events_of(
    found: Sequence[TorchPartition], costs: CostModel, alignment: int, *, in_place: bool = False
) -> Iterator[tuple[TorchPartition, Workload, Events]]:
    """Yield each partition, the step as a workload (the same for all), and the events of torch's step."""
    workload: Workload | None = None
    for one in found:
        if workload is None:  # the partitioner cleaned this graph: names match
            graph = _functional(replace(one.captured, graph_module=_copied(one.captured.graph_module)))
            graph = with_inplace_candidates(graph) if in_place else graph
            workload = make_workload(graph, tuple(range(len(graph.ops))), costs, alignment)
        yield one, workload, _events(workload, *one.graphs)


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph in new nodes; fake values are shared."""
    with quiet():
        return fx.GraphModule(module, copy.deepcopy(module.graph))


def _functional(captured: Captured) -> Any:
    """Return the graph of ops without our lowering: torch runs the ops as they are."""
    graph = captured.graph_module.graph
    needs = tangents_needed(graph)
    write_back_mutations(graph, captured.alias_of)
    own_outputs(graph)
    return build(captured, "", needs).graph


def _partitioned(joint: fx.GraphModule, asked: float) -> tuple[fx.Graph, fx.Graph]:
    """Return forward and backward as torch.compile would make them; the partitioner cleans `joint` on the way."""
    descs = [node.meta["desc"] for node in joint.graph.nodes if node.op == "placeholder"]
    static = [i for i, desc in enumerate(descs) if isinstance(desc, (ParamAOTInput, BufferAOTInput))]
    _, _, returned = returned_by(joint.graph)
    results = sum(desc is not None and not isinstance(desc, GradAOTOutput) for desc in returned)
    with quiet(), fake_mode_of(joint.graph), config.patch(activation_memory_budget=asked), torch.no_grad():
        forward, backward = min_cut_rematerialization_partition(
            joint, None, num_fwd_outputs=results, static_lifetime_input_indices=static
        )
    return forward.graph, backward.graph


def _events(workload: Workload, forward: fx.Graph, backward: fx.Graph) -> Events:
    """Return what both graphs run, in order. What the backward recomputes was dropped, unless the forward saved it."""
    g, w = workload.graph, workload
    index = {op.name: i for i, op in enumerate(g.ops)}
    storage = {value.name: value.storage for value in g.values}
    saved = {storage[node.name] for node in backward.nodes if node.op == "placeholder" and node.name in storage}
    events: list[Event] = []
    ran: set[int] = set()

    def run(ops: Sequence[int]) -> None:
        """Append the events of `ops`; the storages of an op that runs again are dropped first, unless saved."""
        for i in ops:
            if i in ran:
                events.extend(Event(Kind.DROP, s) for s in w.writes[i] if s not in saved)
            events.append(Event(Kind.RUN, i))
            ran.add(i)

    def left(phase: Phase) -> list[int]:
        """Return the ops that our passes added: write-backs and the gradients' own bytes."""
        known = {node.name for node in (*forward.nodes, *backward.nodes)}
        return [i for i, op in enumerate(g.ops) if op.phase is phase and op.name not in known]

    for module, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
        run([index[node.name] for node in module.nodes if node.op == "call_function" and node.name in index])
        run(left(phase))
    return tuple(events)
