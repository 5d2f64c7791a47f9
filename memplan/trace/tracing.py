"""From a model to a `TracedGraph`: captured, rewritten by the passes one after another, and read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from memplan.core.division import Division, compression_of
from memplan.core.in_place import with_inplace_candidates
from memplan.errors import UnsupportedGraph
from memplan.trace.capture.front_ends import Captured, capture
from memplan.trace.capture.refusals import keywords_of
from memplan.trace.chunking.chunk import divide
from memplan.trace.compression.pack import pack_masks
from memplan.trace.compression.quantize import quantize
from memplan.trace.graph.build import build
from memplan.trace.graph.offload_target import Target, hosted, require_at_home, target_of
from memplan.trace.lowering.rules import lower
from memplan.trace.optimizer.optimizers import require_supported
from memplan.trace.optimizer.updates import Accumulate, append_updates
from memplan.trace.passes.fold import fold
from memplan.trace.passes.own_outputs import own_the_results, tangents_needed, write_back_mutations
from memplan.trace.passes.rewrite import copy_of, value
from memplan.trace.passes.simplify import simplify
from memplan.trace.traced import TracedGraph


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    in_place: bool = True,
    device: Any = None,
    resident: bool = False,
) -> TracedGraph:
    """Trace one step of `model`; raises `UnsupportedGraph`. `train=None` follows `model.training`.

    `in_place`: let results take the bytes of dying inputs (see `memplan.core.in_place`). `device`: where the step runs while
    the model and the caller stay on the CPU (see `offload_target.py`); raises `UnsupportedDevice`. `resident`: parameters'
    gradients lie in the arena to the end of the step.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    train = bool(getattr(model, "training", True)) if train is None else train
    captured, target = _captured_for(device, model, args, keywords_of(example_kwargs), train=train)
    return _divisible(captured, type(model).__name__, own_the_results, target, in_place=in_place, resident=resident)


def _captured_for(
    device: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> tuple[Captured, Target | None]:
    """What is captured, as if it were on the device that the user names (None: where it is)."""
    if device is None:
        return capture(model, args, kwargs, train=train), None
    target = target_of(device)
    require_at_home(model, (args, kwargs))
    return capture(model, args, kwargs, train=train, device=target.device), target


def _divisible(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None],
    target: Target | None,
    *,
    in_place: bool,
    resident: bool = False,
) -> TracedGraph:
    """Trace what was captured; the result can be had again with another division or compression."""

    @lru_cache(maxsize=2)
    def make(division: Division | None, compress: str) -> TracedGraph:
        copied = fx.GraphModule(captured.graph_module, copy_of(captured.graph_module.graph))
        whole = replace(captured, graph_module=copied)
        streamed = target is not None
        traced = trace_captured(whole, model, finish, division, compress, resident=resident, streamed=streamed)
        return replace(_finished(traced, target, in_place=in_place), again=make)

    return make(None, "")


def _finished(traced: TracedGraph, target: Target | None, *, in_place: bool) -> TracedGraph:
    traced = traced if target is None else hosted(traced, target)
    return replace(traced, graph=with_inplace_candidates(traced.graph)) if in_place else traced


def trace_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example_inputs: tuple[Any, ...],
    example_kwargs: dict[str, Any] | None = None,
    *,
    clip_grad_norm: float | None = None,
    accumulate: Accumulate | None = None,
    rates_in_memory: bool = False,
    in_place: bool = True,
    device: Any = None,
) -> TracedGraph:
    """Trace forward, backward and the optimizer's update of a model that returns its loss.

    `accumulate`: what the step does with its gradients when one update takes those of several steps. Creates
    the optimizer's state where it has none yet. `rates_in_memory`: see `append_updates`. `device`: as in `trace`.
    Raises `UnsupportedGraph`.
    """
    require_supported(optimizer)
    captured, target = _captured_for(device, model, example_inputs, keywords_of(example_kwargs), train=True)
    _require_one_number(captured)

    def update(graph: fx.Graph) -> None:
        append_updates(
            graph,
            model,
            optimizer,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            rates_in_memory=rates_in_memory,
            device=None if target is None else target.device,
        )

    return _divisible(captured, type(model).__name__, update, target, in_place=in_place)


def _require_one_number(captured: Captured) -> None:
    """Raise `UnsupportedGraph` for a loss of which `backward()` would not know the gradient to begin with."""
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    shapes = [tuple(value(n).shape) for n in nodes if n.meta["desc"].is_tangent()]
    leaves = captured.out_spec.num_leaves
    if leaves != 1 or math.prod(shapes[0]) != 1:
        what = f"returns {leaves} values" if leaves != 1 else f"returns a tensor of shape {shapes[0]}"
        raise UnsupportedGraph("loss_fn", f"{what}, a step minimises one number", "return the mean or the sum alone")


def trace_graph(module: nn.Module, inputs: tuple[Any, ...], *, train: bool, in_place: bool = True) -> TracedGraph:
    """Trace a graph that dynamo has made of a part of a model, wrapped as a module that keeps its parameters."""
    captured = capture(module, inputs, {}, train=train, by_dynamo=True)
    return _finished(trace_captured(captured, type(module).__name__), None, in_place=in_place)


def trace_captured(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None] = own_the_results,
    division: Division | None = None,
    compress: str = "",
    *,
    resident: bool = False,
    streamed: bool = False,
) -> TracedGraph:
    """Run the passes over a captured graph (which they change) and read it; `finish` is the last of them.

    `streamed`: what is not planned is on the host, from where a constant would be copied at each use: none is made.
    """
    graph = captured.graph_module.graph
    needs = tangents_needed(graph)
    write_back_mutations(graph, captured.alias_of)
    if not streamed:
        fold(captured.graph_module)
    simplify(graph)
    made = None if division is None else divide(graph, division)
    if compression_of(compress):
        pack_masks(graph)
    if compress == "int8":
        quantize(graph)
    lower(graph, constants=not streamed)
    finish(graph)
    return replace(build(captured, model, needs, resident=resident), division=made, compress=compress)
