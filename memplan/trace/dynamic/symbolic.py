"""Trace with sizes that vary: one joint graph in which every size is an expression of the user's symbols.

Dynamo reads the Python with the varying dimensions marked, AOTAutograd traces the joint graph on fake tensors whose
sizes are symbols, and the same passes run over it as for fixed shapes: they see symbols where they saw numbers. The
alternative, tracing several shapes and fitting expressions to their sizes, is neither exact nor cheap: here integer
division and the larger of two sizes come out as they are, and one trace does instead of ten. Torch also reports what
the trace depends on: every branch that a size decided, in Python or in a fake kernel, is a guard. Guards become the
plan's conditions, so a shape that would have been traced differently is refused or planned on its own, never run by
the wrong graph.

Dynamo and AOTAutograd have different symbols, and both are replaced by the user's. The shapes that are traced (the
tracing hints) are near those of the example, but equal to no other size in use: an equality that holds only by
coincidence would become a condition. Torch treats 0 and 1 as special, so a size of 1 is never covered.

What activation checkpoints compute again does not depend on sizes. So the ops that run again become ops of the traced
step itself, with the sizes of the first run; then the step is planned like any other. Random results are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.in_place import with_inplace_candidates
from memplan.errors import InvalidShapes, UnsupportedGraph
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.equivalent import require_equivalent
from memplan.evict.policies.checkpoint import checkpoint
from memplan.planning.checkpoints import has_checkpoints, without_checkpoints
from memplan.planning.fit import make_workload
from memplan.planning.options import DEFAULTS, DynamicShapes, PlanOptions
from memplan.symbolic.plan import SymbolicPlan, make_symbolic, stable
from memplan.symbolic.sizes import SizesWriter, Symbol, evaluator, holder, with_stable_candidates
from memplan.torch_inside.graphs import FakeTensor
from memplan.trace.capture.refusals import require_traceable
from memplan.trace.dynamic.dims import Dims, Range, SymbolicTrace, read_dims, same_step, without
from memplan.trace.dynamic.symbolic_capture import read_symbolic, sized_kernel, tracing_hints
from memplan.trace.dynamic.symbols import Translator, disjunction, nearest_excluded, without_implied
from memplan.trace.dynamic.symbols import fixed_symbol as pinned_by
from memplan.trace.graph.remap_to_plan import kernel_of
from memplan.trace.planning import plan_traced
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


_WIDENINGS = 2  # further traces that test whether a condition matters


def trace_symbolic(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: DynamicShapes,
    train: bool,
    in_place: bool = True,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
    fixed: Collection[str] = (),
) -> SymbolicTrace:
    """Trace one step of `model` for all shapes that `dynamic_shapes` allows; symbols in `fixed` do not vary.

    The other arguments are those of `memplan.trace.trace`.

    Raises `InvalidShapes` if the shapes make no sense or the model works for one size of a dimension only (the error
    names the line and the condition), and `UnsupportedGraph` if the model cannot be traced.
    """
    require_traceable(model)
    _refuse_fakes(model, args, kwargs)
    dims = without(read_dims(model, args, kwargs, dynamic_shapes), fixed)
    trace = partial(
        _trace,
        model,
        args,
        kwargs,
        train=train,
        in_place=in_place,
        gradients_in_arena=gradients_in_arena,
        copy_gradients=copy_gradients,
    )
    while True:  # where the model fixes a dimension that need not vary, the rest is traced again
        outcome = trace(dims)
        if isinstance(outcome, SymbolicTrace):
            break
        dims = outcome
    for _ in range(_WIDENINGS):
        other = _trace_beyond(outcome, trace)
        if other is None or not same_step(outcome, other):
            break
        outcome = replace(outcome, conditions=disjunction(outcome.dims.symbols, outcome.conditions, other.conditions))
    return follow_checkpoints(outcome, in_place=in_place)


def _trace_beyond(found: SymbolicTrace, trace: Callable[[Dims], SymbolicTrace | Dims]) -> SymbolicTrace | None:
    """Return a trace where the conditions of `found` do not hold; None if they always hold, or no such trace works."""
    hints = {s.name: s.hint for s in found.symbols}
    out = nearest_excluded(found.dims.symbols, hints, found.conditions)
    if out is None:
        return None
    there = replace(found.dims, symbols=tuple(replace(s, example=out[s.name]) for s in found.dims.symbols))
    try:
        other = trace(there)
    except (InvalidShapes, UnsupportedGraph):
        return None
    return other if isinstance(other, SymbolicTrace) else None


def _refuse_fakes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedGraph` for fake or meta tensors."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
    if any(isinstance(t, torch.Tensor) and (t.is_meta or isinstance(t, FakeTensor)) for t in tensors):
        what = "has fake or meta tensors, which are traced for one shape only"
        hint = "materialise the model (a smaller one of its kind will do), or leave dynamic_shapes out"
        raise UnsupportedGraph(type(model).__name__, what, hint, see="fake-shapes")


def plan_symbolic(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    options: PlanOptions,
) -> SymbolicPlan:
    """Return the symbolic plan of `memplan.plan` with `options.dynamic_shapes`. Raises as `trace_symbolic` does."""
    assert options.dynamic_shapes is not None
    args, kwargs = arguments_of(example_inputs, example_kwargs)
    train = bool(getattr(model, "training", True)) if train is None else train
    traced = trace_symbolic(
        model,
        args,
        kwargs,
        dynamic_shapes=options.dynamic_shapes,
        train=train,
        gradients_in_arena=options.gradients_in_arena,
        copy_gradients=options.gradients_copied,
    )
    return plan_of(traced, options)


def plan_of(traced: SymbolicTrace, options: PlanOptions = DEFAULTS, *, redzone: int = 0) -> SymbolicPlan:
    """Return the symbolic plan of a symbolic trace. `redzone` is in bytes, as in `plan_traced`."""
    return make_symbolic(
        symbols=traced.symbols,
        sizes=traced.sizes,
        plan=plan_traced(traced.traced, options, redzone=redzone),
        conditions=traced.conditions,
        inputs=[shape or () for shape in traced.leaves],
    )


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Dims,
    *,
    train: bool,
    in_place: bool,
    gradients_in_arena: bool,
    copy_gradients: bool,
) -> SymbolicTrace | Dims:
    """Return a symbolic trace, or, if the model fixes a symbol that need not vary, the dims without that symbol."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    hints = tracing_hints(model, flat, dims)
    alias_classes, traced = read_symbolic(
        model,
        flat,
        spec,
        dims,
        hints,
        train=train,
        gradients_in_arena=gradients_in_arena,
        copy_gradients=copy_gradients,
    )
    translator = alias_classes.translator
    conditions = translator.conditions()
    writer = SizesWriter()
    kernels = tuple(sized_kernel(k, translator, writer) for k in traced.kernels if isinstance(k, KernelCall))
    sizes = writer.finish(alias_classes.storage_texts(), alias_classes.view_texts)
    fixed_symbol = pinned_by(dims.symbols, hints, conditions)
    if fixed_symbol is not None:
        return _fixed(dims, fixed_symbol, translator)
    conditions = without_implied(dims.symbols, conditions)
    names = [s.name for s in dims.symbols]
    example = {s.name: s.example for s in dims.symbols}
    if not all(holder(conditions, names)(*example.values())):
        example = hints
    made = SymbolicTrace(
        symbols=tuple(Symbol(name=s.name, min=s.min, max=s.max, hint=example[s.name]) for s in dims.symbols),
        conditions=conditions,
        traced=traced,
        kernels=kernels,
        sizes=sizes,
        dims=dims,
        leaves=tuple(_shape(x, dims.leaves[i]) if isinstance(x, torch.Tensor) else None for i, x in enumerate(flat)),
        evaluate=evaluator(sizes.expressions, names),
    )
    traced = made.at(example, flat)
    graph = stable(with_inplace_candidates(traced.graph), sizes) if in_place else traced.graph
    return replace(made, traced=replace(traced, graph=graph))


def _shape(x: torch.Tensor, varying: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the shape of an input as expressions."""
    return tuple(str(varying.get(i, int(n))) for i, n in enumerate(x.shape))


def _fixed(dims: Dims, fixed_symbol: tuple[Range, str], translator: Translator) -> Dims:
    """Return the dims without a symbol that the model fixes. Raises `InvalidShapes` if that symbol must vary."""
    s, text = fixed_symbol
    if s.strict:
        reason = translator.reason(text)
        what = f"the model fixes {s.name}: it was traced under the condition {text}{reason}"
        hint = f"leave {s.name} out of dynamic_shapes, write Dim.AUTO for it, or change that line"
        raise InvalidShapes(what, where=f"dynamic_shapes: {s.name}", hint=hint, see="fixed-size")
    return without(dims, (s.name,))
