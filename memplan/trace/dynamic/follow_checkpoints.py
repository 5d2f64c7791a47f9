"""Follows the activation checkpoints of a model in a step that is traced for many sizes.

What a region computes again does not depend on sizes. So the ops that run again become ops of the traced step itself,
with the sizes of the first run; then the step is planned like any other. Random results are kept.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.core.in_place import with_inplace_candidates
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.equivalent import require_equivalent
from memplan.evict.policies.checkpoint import checkpoint
from memplan.planning.checkpoints import has_checkpoints, without_checkpoints
from memplan.planning.fit import make_workload
from memplan.symbolic.sizes import with_stable_candidates
from memplan.trace.dynamic.varying import SymbolicTrace
from memplan.trace.graph.remap_to_plan import kernel_of
from memplan.trace.traced import KernelCall


def follow_checkpoints(found: SymbolicTrace, *, in_place: bool) -> SymbolicTrace:
    """Return a trace in which what checkpoints drop is computed again, where eager computes it again.

    `in_place`: results may take the bytes of inputs.
    """
    graph = found.traced.graph
    if not has_checkpoints(graph):
        return found
    workload = make_workload(graph, tuple(range(len(graph.ops))), DEVICES["cpu"], alignment=1)
    applied = apply(workload, checkpoint(workload))
    require_equivalent(graph, applied.graph, applied.sources)
    steps = tuple(zip(applied.graph.ops, applied.sources, strict=True))

    def kernels(of: tuple[KernelCall, ...]) -> tuple[KernelCall, ...]:
        """Return the kernels of all ops; `of` are those of the ops as they were traced."""
        base = replace(found.traced, kernels=of)
        made = (kernel_of(base, applied.graph, op, source) for op, source in steps)
        return tuple(kernel for kernel in made if isinstance(kernel, KernelCall))

    first = dict(zip((further for _, further in applied.instances), applied.instances, strict=True))
    storages = [*found.sizes.storages]
    storages += [found.sizes.storages[first[i][0]] for i in range(len(storages), len(applied.graph.storages))]
    place = {value.name: i for i, value in enumerate(graph.values)}
    views = [*found.sizes.views]
    views += [found.sizes.views[place[v.name.rpartition("@")[0]]] for v in applied.graph.values[len(views) :]]
    sizes = replace(found.sizes, storages=tuple(storages), views=tuple(views))
    made = without_checkpoints(applied.graph)
    made = with_stable_candidates(with_inplace_candidates(made), sizes) if in_place else made
    traced = replace(found.traced, graph=made, kernels=kernels(_called(found.traced.kernels)))
    return replace(found, traced=traced, kernels=kernels(found.kernels), sizes=sizes)


def _called(kernels: tuple[object, ...]) -> tuple[KernelCall, ...]:
    """Return the kernels of a traced step, which are all calls."""
    return tuple(kernel for kernel in kernels if isinstance(kernel, KernelCall))
