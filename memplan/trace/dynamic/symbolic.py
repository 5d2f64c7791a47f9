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

from collections.abc import Collection, Mapping
from dataclasses import replace
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
from memplan.symbolic.plan import SymbolicPlan, make_symbolic
from memplan.symbolic.sizes import SizesWriter, Symbol, evaluator, holder, with_stable_candidates
from memplan.torch_inside.graphs import FakeTensor
from memplan.trace.capture.refusals import require_traceable
from memplan.trace.dynamic.dims import Range, SymbolicTrace, read_dims, without
from memplan.trace.dynamic.symbolic_capture import read_symbolic, sized_kernel, tracing_hints
from memplan.trace.dynamic.symbols import Translator, fixed_symbol, without_implied
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
    base = replace(found.traced, kernels=found.kernels)
    steps = zip(applied.graph.ops, applied.sources, strict=True)
    kernels = (kernel_of(base, applied.graph, op, source) for op, source in steps)
    first = dict(zip((further for _, further in applied.instances), applied.instances, strict=True))
    storages = [*found.sizes.storages]
    storages += [found.sizes.storages[first[i][0]] for i in range(len(storages), len(applied.graph.storages))]
    place = {value.name: i for i, value in enumerate(graph.values)}
    views = [*found.sizes.views]
    views += [found.sizes.views[place[v.name.rpartition("@")[0]]] for v in applied.graph.values[len(views) :]]
    sizes = replace(found.sizes, storages=tuple(storages), views=tuple(views))
    whole = without_checkpoints(applied.graph)
    whole = with_stable_candidates(with_inplace_candidates(whole), sizes) if in_place else whole
    made = replace(
        found,
        traced=replace(found.traced, graph=whole),
        kernels=tuple(kernel for kernel in kernels if isinstance(kernel, KernelCall)),
        sizes=sizes,
    )
    hints = {s.name: s.hint for s in found.symbols}
    return replace(made, traced=made.at(hints, found.traced.example_inputs))


def trace_symbolic(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: DynamicShapes,
    train: bool,
    in_place: bool = True,
    fixed: Collection[str] = (),
    **options: Any,
) -> SymbolicTrace:
    """Trace one step of `model` for all shapes that `dynamic_shapes` allows; symbols in `fixed` do not vary.

    The other arguments and `options` are those of `memplan.trace.trace`.

    Raises `InvalidShapes` if the shapes make no sense or the model works for one size of a dimension only (the error
    names the line and the condition), and `UnsupportedGraph` if the model cannot be traced.
    """
    require_traceable(model)
    _refuse_fakes(model, args, kwargs)
    dims = without(read_dims(model, args, kwargs, dynamic_shapes), fixed)
    flat, spec = pytree.tree_flatten((args, kwargs))
    hints = tracing_hints(model, flat, dims)
    alias_classes, traced = read_symbolic(model, flat, spec, dims, hints, train=train, **options)
    translator = alias_classes.translator
    conditions = translator.conditions()
    writer = SizesWriter()
    kernels = tuple(sized_kernel(k, translator, writer) for k in traced.kernels if isinstance(k, KernelCall))
    sizes = writer.finish(alias_classes.storage_texts(), alias_classes.view_texts)
    found = fixed_symbol(dims.symbols, hints, conditions)
    if found is not None:  # the rest is traced again
        _require_free(*found, translator)
        rest = {"dynamic_shapes": dynamic_shapes, "fixed": (*fixed, found[0].name), **options}
        return trace_symbolic(model, args, kwargs, train=train, in_place=in_place, **rest)
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
    graph = with_stable_candidates(with_inplace_candidates(traced.graph), sizes) if in_place else traced.graph
    return follow_checkpoints(replace(made, traced=replace(traced, graph=graph)), in_place=in_place)


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


def _shape(x: torch.Tensor, varying: Mapping[int, Any]) -> tuple[str, ...]:
    """Return the shape of an input as expressions."""
    return tuple(str(varying.get(i, int(n))) for i, n in enumerate(x.shape))


def _require_free(s: Range, text: str, translator: Translator) -> None:
    """Raise `InvalidShapes` for a symbol that the model fixes by a condition, and that must vary."""
    if s.strict:
        what = f"the model fixes {s.name}: it was traced under the condition {text}{translator.reason(text)}"
        hint = f"leave {s.name} out of dynamic_shapes, write Dim.AUTO for it, or change that line"
        raise InvalidShapes(what, where=f"dynamic_shapes: {s.name}", hint=hint, see="fixed-size")
