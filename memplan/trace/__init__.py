"""Tracing: `nn.Module` + example inputs -> `TracedGraph`, and `plan`, which needs nothing but the trace.

In the order in which data flows: `capture.py` (front ends), `returns.py` and `rules.py` (passes over the fx
graph, through `rewrite.py`), `build.py` (fx graph -> `traced.py`). Nothing is computed here.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from torch import nn

from memplan.plan import Plan, make_plan
from memplan.schedule import traced as traced_order
from memplan.solve import Solver
from memplan.trace.build import build
from memplan.trace.capture import Captured, capture
from memplan.trace.returns import own_the_gradients, write_back_mutations
from memplan.trace.rules import lower
from memplan.trace.traced import TracedGraph

__all__ = ["Captured", "TracedGraph", "alignment_of", "capture", "plan", "plan_traced", "trace", "trace_captured"]


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
) -> TracedGraph:
    """Trace one step of `model`; raises `UnsupportedGraph`. `train=None` follows `model.training`."""
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    train = bool(getattr(model, "training", True)) if train is None else train
    return trace_captured(capture(model, args, example_kwargs or {}, train=train), type(model).__name__)


def trace_captured(captured: Captured, model: str) -> TracedGraph:
    """Run the passes over a captured graph (which they change) and read it."""
    graph = captured.graph_module.graph
    write_back_mutations(graph)
    lower(graph)
    own_the_gradients(graph)
    return build(captured, model)


def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Plan:
    """Plan one step of `model` from fake tensors: what it needs, to the byte, without computing anything.

    `example_inputs` is the tuple of positional arguments (or the only one), `example_kwargs` the others;
    real, fake and meta tensors will do, and so they will as parameters. `train`: plan forward and backward
    (None: as `model.training` says) or the forward alone. `time_limit` is the solver's, in seconds. Raises
    `UnsupportedGraph` when the model cannot be traced as one graph.
    """
    traced = trace(model, example_inputs, example_kwargs, train=train)
    return plan_traced(traced, solver=solver, time_limit=time_limit)


def plan_traced(
    traced: TracedGraph, *, solver: str | Solver = "auto", time_limit: float | None = None, redzone: int = 0
) -> Plan:
    """Order a traced step and place its storages; `redzone` is in bytes (see `lifetimes.problem`)."""
    from memplan import __version__

    return make_plan(
        model=traced.model,
        graph=traced.graph,
        schedule=traced_order(traced.graph),
        alignment=alignment_of(traced.device),
        redzone=redzone,
        versions={"memplan": __version__, "torch": torch.__version__, "python": platform.python_version()},
        solver=solver,
        time_limit=time_limit,
    )


def alignment_of(device: torch.device) -> int:
    """Bytes: a cache line, or what CUDA's own allocator rounds to."""
    return 512 if device.type == "cuda" else 64
