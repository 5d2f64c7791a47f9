"""The trial run: runs the step once, op by op, on the example inputs, before code is generated.

It chooses and verifies the callable of each op on real data, and measures what the kernels allocate by themselves. It
changes no tensor of the user: ops that write to parameters, buffers or inputs are not run, and the state of random
generators is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from memplan.core.graph import StorageKind, Value
from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.codegen.step_ir import Layout
from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm, KernelSelector, materialise
from memplan.runtime.memory.arena import dtype_of, offset_within, view_of
from memplan.runtime.memory.measure import peak_bytes
from memplan.trace.traced import KernelCall, Source, TracedGraph


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context that disables autocast: casts are part of the trace, and must not happen twice."""
    return torch.autocast(device.type, enabled=False)


def run_trial(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    static: Mapping[int, torch.Tensor],
    tensors: Mapping[int, torch.Tensor],
    *,
    transfers: Mapping[int, BoundOp],
) -> tuple[Plan, tuple[BoundOp, ...]]:
    """Return the plan with measured kernels and temporaries, and the bound ops (indexed like those of the graph).

    `transfers` and saved generator states are bound already; in the trial run, transfers copy immediately.
    """
    env = [*(static.get(index) for index in range(len(traced.graph.values))), *[None] * traced.opaque_count]
    fill_dynamic(env, traced, layout, tensors)
    devices = [traced.device] if traced.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), without_autocast(traced.device):
        bound = _select_kernels(traced, plan, layout, env, transfers)
        temporaries = None
        if not torch.autograd.profiler._is_profiler_enabled:  # it would end a session of the user
            temporaries = _measure(traced, plan, layout, bound, env)
    ops = zip(plan.graph.ops, bound, strict=True)
    measured = tuple(replace(op, direct=b.form is not CallForm.FUNCTIONAL) for op, b in ops)
    return replace(plan, graph=replace(plan.graph, ops=measured), temporaries=temporaries), bound


def _select_kernels(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    env: list[torch.Tensor | None],
    transfers: Mapping[int, BoundOp],
) -> tuple[BoundOp, ...]:
    selector = KernelSelector(traced.graph)
    bound = dict(transfers)
    for index in plan.schedule.order:
        kernel = traced.kernels[index]
        if isinstance(kernel, KernelCall):
            bound[index] = selector.select(kernel, env)
        if leaves_users_alone(traced, layout, index):
            run_bound(bound[index], env)
    return tuple(bound[index] for index in range(len(bound)))


def _measure(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    bound: Sequence[BoundOp],
    env: list[torch.Tensor | None],
) -> tuple[int, ...]:
    """Return for each op the most bytes outside the arena while it runs, without those that the caller will own."""
    graph = traced.graph
    order = [i for i in plan.schedule.order if leaves_users_alone(traced, layout, i)]
    thunks: list[Callable[[], None]] = [partial(run_bound, bound[i], env) for i in order]
    found, seen = [0] * len(graph.ops), set[int]()
    for index, peak in zip(order, peak_bytes(thunks, traced.device), strict=True):
        adopted, op = 0, graph.ops[index]
        if bound[index].form is CallForm.FUNCTIONAL:  # what it writes to later is copied there
            new = layout.fresh_storages.intersection(graph.written(op)) - seen
            adopted = sum(graph.storages[s].nbytes for s in new)
        seen.update(graph.touched(op))
        found[index] = max(peak - adopted, 0)
    return tuple(found)


def leaves_users_alone(traced: TracedGraph, layout: Layout, index: int) -> bool:
    """Return whether an op can be tried: it changes no tensor of the user, and is not a check that only raises."""
    graph = traced.graph
    if graph.ops[index].only_raises:
        return False
    written = graph.written(graph.ops[index])
    ours = {s for s in written if graph.storages[s].planned or graph.storages[s].kind is StorageKind.HOST}
    return all(s in ours or s in layout.fresh_storages for s in written)


def fill_dynamic(
    env: list[torch.Tensor | None], traced: TracedGraph, layout: Layout, tensors: Mapping[int, torch.Tensor]
) -> None:
    """Fill `env` with stand-ins for dynamic values.

    They are the example inputs, ones for tangents, and new memory for results that the caller will own.
    """
    graph = traced.graph
    owner: dict[int, torch.UntypedStorage] = {}
    base: dict[int, tuple[Value, int]] = {}
    for i, b in enumerate(traced.bindings):
        value = graph.values[b.value]
        if b.source is Source.INPUT:
            owner[value.storage] = tensors[i].untyped_storage()
            base[value.storage] = value, int(tensors[i].storage_offset())
        elif b.source is Source.TANGENT:
            device = torch.device(graph.storages[value.storage].device)
            ones = torch.empty_strided(value.shape, value.strides, dtype=dtype_of(value), device=device)
            owner[value.storage] = ones.fill_(1).untyped_storage()
    for storage in layout.fresh_storages:
        s = graph.storages[storage]
        owner[storage] = torch.empty(s.nbytes, dtype=torch.uint8, device=s.device).untyped_storage()
    for index, value in enumerate(graph.values):
        if env[index] is None and value.storage in owner:
            within = base.get(value.storage)
            offset = None if within is None else offset_within(within[0], value, within[1])
            env[index] = view_of(owner[value.storage], value, offset)


def run_bound(bound: BoundOp, env: list[torch.Tensor | None]) -> None:
    """Run one op on real tensors, outside generated code."""
    args, kwargs = materialise((bound.args, bound.kwargs), env)
    if bound.form is CallForm.START:
        destination, source = args
        destination.copy_(source)
        return
    if bound.form is CallForm.WAIT:
        return
    results = bound.function(*args, **kwargs)
    for position, number in bound.opaque_results:
        env[-1 - number] = results[position]
    if bound.form is CallForm.FUNCTIONAL:
        for out, result in zip(bound.outs, results if bound.returns_sequence else (results,), strict=True):
            if out is not None:
                destination = env[out]
                assert destination is not None
                if result.shape != destination.shape:  # otherwise the copy may broadcast it
                    reason = f"its result is {tuple(result.shape)}, and was traced as {tuple(destination.shape)}"
                    hint = "call the model once before compiling it, if it takes sizes from its first call"
                    raise UnsupportedGraph(str(bound.overload), reason, hint, see="other-result")
                destination.copy_(result)
