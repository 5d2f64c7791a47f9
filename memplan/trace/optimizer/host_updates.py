"""Move updates of an optimizer to the CPU's cores, where parameters and state rest in a step with `device=`.

Such an update reads a gradient that was copied to the host once. Its state never crosses the link. The kernel is
torch's own for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph, Op, StorageKind
from memplan.core.plan import Plan
from memplan.devices.kinds import HOST
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import CostModel, busy_seconds
from memplan.trace.optimizer.updates import UPDATES
from memplan.trace.passes.rewrite import aten
from memplan.trace.traced import Kernel, KernelCall, Ref, TracedGraph

_WORTH = 0.01  # of the step's time: what moving updates has to save
_GRADIENT = 1  # where an update has it among its arguments


def with_cheapest_updates(
    traced: TracedGraph, plan: Plan, costs: CostModel, make: Callable[[TracedGraph], Plan]
) -> tuple[TracedGraph, Plan]:
    """Return a step, and its plan, with as many updates on the host as the costs say.

    Args:
        traced: The step with all updates on the device.
        plan: Its plan.
        costs: What predicts the seconds of plans.
        make: Returns the plan of a step, or raises `BudgetInfeasible`.
    """
    chosen = _cheapest(traced, plan, costs) if costs.updates else ()
    if not chosen or plan.eviction is None:
        return traced, plan
    found = on_host(traced, chosen)
    try:
        made = make(found)
    except BudgetInfeasible:
        return traced, plan
    faster = made.eviction is not None and made.eviction.seconds < (1 - _WORTH) * plan.eviction.seconds
    return (found, made) if faster else (traced, plan)


def _cheapest(traced: TracedGraph, plan: Plan, costs: CostModel) -> Sequence[int]:
    """Return the updates to move, so that the busiest lane ends first; none where that saves little.

    The first gradients' updates are moved, which have the most time. The state of a moved update crosses the link no
    more, its parameter once less, and its gradient once.
    """
    graph, ready, clock = traced.graph, dict[str, float](), 0.0
    for op in plan.graph.ops:
        clock += 0.0 if op.target in TRANSFERS else costs.op_seconds(plan.graph, op)
        ready[op.name] = clock
    updates = sorted(movable_updates(traced), key=lambda i: ready[graph.ops[i].name])
    busy, host = busy_seconds(plan.graph, costs), 0.0
    to_device, to_host = busy["copies to the device"], busy["copies to the host"]
    bounds = [max(busy["kernels"], to_device, to_host)]
    for i in updates:
        op = replace(graph.ops[i], on_host=True)
        gradient = graph.values[_gradient(traced.kernels[i])].storage
        host = max(host, ready[op.name]) + costs.seconds_on_host(graph, op)
        for s in graph.touched(op):
            nbytes, kind = graph.storages[s].nbytes, graph.storages[s].kind
            to_host += costs.to_host.seconds(nbytes) * (1 if s == gradient else -1)
            to_device -= costs.to_device.seconds(nbytes) if kind is StorageKind.OPTIMIZER_STATE else 0.0
        bounds.append(max(busy["kernels"], to_device, to_host, host))
    least = min(bounds)
    return updates[: bounds.index(least)] if least < (1 - _WORTH) * bounds[0] else ()


def movable_updates(traced: TracedGraph) -> tuple[int, ...]:
    """Return the updates (ops, in traced order) that may run on the host: of one device's step, with a gradient that
    is whole, that no one else keeps, and that nothing changes later."""
    graph = traced.graph
    if len(traced.runs_on) != 1:
        return ()
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    updates = {i: _gradient(k) for i, k in enumerate(traced.kernels) if isinstance(k, KernelCall) and _is_update(k)}
    last = {s: i for i, op in enumerate(graph.ops) for s in graph.touched(op)}
    return tuple(
        i
        for i, value in updates.items()
        if (home := graph.values[value].storage) not in kept
        and last[home] == i
        and _is_whole(graph, home)
        and not any(graph.storages[s].planned for s in graph.touched(graph.ops[i]) if s != home)
    )


def on_host(traced: TracedGraph, chosen: Collection[int]) -> TracedGraph:
    """Return the step with these of its updates (`movable_updates`) on the host."""
    if not chosen:
        return traced
    graph = traced.graph
    gradients = {graph.values[_gradient(traced.kernels[i])].storage for i in chosen}
    touched = {s for i in chosen for s in graph.touched(graph.ops[i])}
    made: dict[str, Any] = {"kind": StorageKind.GRADIENT, "planned": False, "device": HOST}
    storages = tuple(replace(s, **made) if i in gradients else s for i, s in enumerate(graph.storages))
    pairs: list[tuple[Op, Kernel]] = []
    for i, (op, kernel) in enumerate(zip(graph.ops, traced.kernels, strict=True)):
        if isinstance(kernel, KernelCall) and kernel.target is aten._foreach_add_.Scalar:
            pairs += _counted(graph, op, kernel, touched)
        else:
            pairs.append((replace(op, on_host=True) if i in chosen else op, kernel))
    ops, kernels = zip(*pairs, strict=True)
    return replace(traced, graph=replace(graph, ops=ops, storages=storages), kernels=kernels)


def with_updates_as_in(traced: TracedGraph, plan: Plan) -> TracedGraph:
    """Return the step with those of its updates on the host that `plan` has there."""
    there = {op.name for op in plan.graph.ops if op.on_host}
    return on_host(traced, [i for i in movable_updates(traced) if traced.graph.ops[i].name in there])


def _counted(graph: Graph, op: Op, kernel: KernelCall, there: Collection[int]) -> Iterator[tuple[Op, KernelCall]]:
    """Yield what increments the counters of the updates on the device, and those of updates on the host (`there`)."""
    for away in (False, True):
        counters = [ref for ref in kernel.args[0] if (graph.values[ref.value].storage in there) == away]
        values = {ref.value for ref in counters}
        reads, writes = (tuple(v for v in of if v in values) for of in (op.reads, op.writes))
        if values:
            part = replace(op, name=f"{op.name}_host" if away else op.name, reads=reads, writes=writes, on_host=away)
            yield part, replace(kernel, args=(counters, *kernel.args[1:]))


def _is_update(kernel: KernelCall) -> bool:
    return kernel.target.overloadpacket in UPDATES and not any(isinstance(x, Ref) for x in kernel.kwargs.values())


def _gradient(kernel: Kernel) -> int:
    """Return the value of the gradient that an update takes."""
    assert isinstance(kernel, KernelCall)
    found: int = kernel.args[_GRADIENT][0].value
    return found


def _is_whole(graph: Graph, storage: int) -> bool:
    """Return whether a planned storage is one tensor, without gaps."""
    first = next(v for v in graph.values if v.storage == storage)
    nbytes = graph.storages[storage].nbytes
    return (
        graph.storages[storage].planned
        and first.dense
        and first.offset == 0
        and prod(first.shape) * first.itemsize == nbytes
    )
