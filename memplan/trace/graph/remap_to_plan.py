"""Remap a traced step to its plan: recomputes and copies get kernels, and values the plan's storages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.core.evictions import SAVE_RNG
from memplan.core.graph import Graph, Op, require_same
from memplan.core.plan import Plan
from memplan.devices.kinds import HOST
from memplan.evict.equivalent import require_equivalent
from memplan.trace.traced import GeneratedCall, Kernel, KernelCall, Ref, SaveState, TracedGraph, Transfer


def require_planned(traced: TracedGraph, plan: Plan) -> None:
    """Raise `PlanMismatch` unless `plan` was made for this very graph.

    Raises `InvalidEviction` if the plan would evict something that is still needed.
    """
    if plan.eviction is None:
        require_same(plan.graph, traced.graph)
    else:
        require_same(_without(plan, traced.graph), traced.graph)
        require_equivalent(traced.graph, plan.graph, plan.eviction.sources)


def outside_as_in(traced: TracedGraph, plan: Plan, *, gradients: bool) -> TracedGraph:
    """Return a step with those activations outside the arena that `plan` has outside; with `gradients`, those too."""
    planned = {s.name for s in plan.graph.storages if s.planned}
    graph, kept = traced.graph, frozenset() if gradients else traced.graph.gradients_in_arena
    outside = {i for i, s in enumerate(graph.storages) if s.planned and i not in kept and s.name not in planned}
    return traced.with_outside(outside) if outside else traced


def _without(plan: Plan, traced: Graph) -> Graph:
    """Return the graph without evictions that `plan` was made from, as far as it can be told: its first values and its
    ops.

    What its ops read and write is left to `require_equivalent`.
    """
    g, n = plan.graph, len(traced.storages)
    values, storages = g.values[: len(traced.values)], g.storages[:n]
    if plan.devices and len(storages) == n:  # the plan decides which device each storage is on
        pairs = zip(storages, traced.storages, strict=True)
        storages = tuple(replace(s, device=t.device) if s.planned and t.planned else s for s, t in pairs)
    known = all(v.storage < len(storages) for v in values)
    names = {op.name for op in g.ops}
    if not known or {op.name for op in traced.ops} - names:
        return g
    return replace(traced, values=values, storages=storages)


def remap_to_plan(traced: TracedGraph, plan: Plan) -> TracedGraph:
    """Return `traced` with the graph of `plan` as it is placed in the arena, and a kernel for each of its ops."""
    kernels = traced.kernels
    if plan.eviction is not None:
        pairs = zip(plan.graph.ops, plan.eviction.sources, strict=True)
        kernels = tuple(
            kernel_of(traced, plan.graph, op, source, multi_device=bool(plan.devices)) for op, source in pairs
        )
    return replace(traced, graph=plan.placed, kernels=kernels)


def _moved(leaf: Any, where: torch.device) -> Any:
    """Return the device that a kernel runs on where `leaf` is the accelerator that it was traced on; else `leaf`."""
    return where if isinstance(leaf, torch.device) and leaf.type == where.type != HOST else leaf


def kernel_of(traced: TracedGraph, graph: Graph, op: Op, source: int, *, multi_device: bool = False) -> Kernel:
    """Return the traced op's kernel on the values of `op`, which are in the same positions as in `traced`."""
    if op.target == SAVE_RNG:
        return SaveState(value=op.writes[0])
    if source < 0:
        return Transfer(target=op.target, reads=op.reads, writes=op.writes)
    kernel, base = traced.kernels[source], traced.graph.ops[source]
    assert isinstance(kernel, (KernelCall, GeneratedCall))
    state = graph.saved_state(op)
    reads = op.reads if state is None else op.reads[:-1]
    new = dict(zip((*base.reads, *base.writes), (*reads, *op.writes), strict=True))

    def moved(leaf: Any) -> Any:
        return Ref(new.get(leaf.value, leaf.value)) if isinstance(leaf, Ref) else leaf

    args, kwargs = pytree.tree_map(moved, (kernel.args, kernel.kwargs))
    if isinstance(kernel, GeneratedCall):
        return replace(kernel, args=args, kwargs=kwargs, state=state)
    outs = tuple(None if out is None else new[out] for out in kernel.outs)
    if multi_device:
        where = torch.device(graph.storages[graph.values[op.writes[0]].storage].device)
        args, kwargs = pytree.tree_map(lambda leaf: _moved(leaf, where), (args, kwargs))
    return replace(kernel, args=args, kwargs=kwargs, outs=outs, state=state)
