"""Tracing with sizes that vary: one joint graph in which every size is an expression of the user's symbols.

Dynamo reads the Python with the varying dimensions marked, AOTAutograd traces the joint graph on fake tensors whose
sizes are symbols, and the same passes as ever run over it: they see symbols where they saw numbers. This was chosen
over tracing several shapes and fitting expressions to their sizes because it is exact (integer division and the larger
of two sizes come out as they are), needs one trace instead of ten, and because torch then *says* what the trace rests
on: every branch that a size decided, in Python or in a kernel's fake, is a guard. Guards become the plan's conditions,
so a shape that would have been traced otherwise is refused or planned on its own, never run by the wrong graph.

Symbols of dynamo and of AOTAutograd are different ones, and both are replaced by the user's. The shapes that are traced
(the tracing hints) are near those of the example, but equal to no other size that is around: a test for equality that
only holds by coincidence would become a condition. Torch traces 0 and 1 as special, so a size of 1 is never covered.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from memplan.errors import InvalidShapes, MemplanError, ShapeOutOfRange, UnsupportedGraph
from memplan.inplace import with_chances
from memplan.symbolic.expression import Evaluate, evaluator
from memplan.symbolic.plan import SymbolicPlan, make_symbolic, stable
from memplan.symbolic.sizes import Sizes, SizesWriter, graph_at
from memplan.symbolic.symbols import Symbol
from memplan.trace import plan_traced
from memplan.trace.build import Builder
from memplan.trace.capture import (
    AS_KERNELS_DO,
    Captured,
    captured,
    dynamo,
    prepare,
    refuse_backward_hooks,
    unsupported,
)
from memplan.trace.dims import Dims, Range, read_dims
from memplan.trace.returns import own_the_results, returned_by, tangents_needed, write_back_mutations
from memplan.trace.rules import lower
from memplan.trace.symbols import Translator
from memplan.trace.traced import Kernel, TracedGraph

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FEW = 20_000  # shapes that are tried one by one to see whether a condition says anything


@dataclass(frozen=True, slots=True)
class Sized:
    """In a kernel's arguments: the number of this expression (a place in `Sizes.expressions`)."""

    place: int


@dataclass(frozen=True, kw_only=True)
class SymbolicTrace:
    """A step traced for every value of its symbols under the conditions.

    `traced` is the one for the hints; its kernels are those of `kernels` with numbers in place of `Sized`s.
    `leaves`: of each leaf of the call, the shape as expressions (None: no tensor).
    """

    symbols: tuple[Symbol, ...]
    conditions: tuple[str, ...]
    traced: TracedGraph
    kernels: tuple[Kernel, ...]
    sizes: Sizes
    dims: Dims
    leaves: tuple[tuple[str, ...] | None, ...]
    evaluate: Evaluate

    def values_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """The values of the symbols in a call with these leaves. Raises `ShapeOutOfRange` when there are none."""
        found: dict[str, int] = {}
        for i, varying in enumerate(self.dims.leaves):
            for dim, v in varying.items():
                x = flat[i]
                if not isinstance(x, torch.Tensor) or x.dim() <= dim:
                    raise ShapeOutOfRange("is no tensor of that many dimensions", where=f"input {i}")
                value, rest = divmod(int(x.shape[dim]) - v.offset, v.factor)
                if rest or found.setdefault(v.symbol, value) != value:
                    what = f"dimension {dim} is {x.shape[dim]}, the plan was made for {v}"
                    if not rest:
                        what += f" with {v.symbol}={found[v.symbol]}"
                    raise ShapeOutOfRange(what, where=f"input {i}", hint="see dynamic_shapes")
        return {s.name: found[s.name] for s in self.symbols}

    def at(self, values: Mapping[str, int], flat: Sequence[Any]) -> TracedGraph:
        """The traced step for these values, with `flat` as its example. Costs milliseconds; nothing is traced."""
        numbers = self.evaluate(*(values[s.name] for s in self.symbols))

        def filled(leaf: Any) -> Any:
            return numbers[leaf.place] if isinstance(leaf, Sized) else leaf

        def kernel(k: Kernel) -> Kernel:
            args, kwargs = pytree.tree_map(filled, (k.args, k.kwargs))
            return replace(k, args=args, kwargs=kwargs)

        return replace(
            self.traced,
            graph=graph_at(self.traced.graph, self.sizes, numbers),
            kernels=tuple(map(kernel, self.kernels)),
            example_inputs=tuple(flat),
        )


def trace_symbolic(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dynamic_shapes: Any,
    train: bool,
    in_place: bool = True,
) -> SymbolicTrace:
    """Trace one step of `model` for all shapes that `dynamic_shapes` allows.

    Raises `InvalidShapes` when they make no sense, or when the model works for one size of a dimension only (naming
    the line and the condition), and `UnsupportedGraph` when it cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedGraph(type(model).__name__, "is not an nn.Module", "pass the model itself, then its inputs")
    refuse_backward_hooks(model)
    dims = read_dims(model, args, kwargs, dynamic_shapes)
    while True:  # a dimension that need not vary is fixed when the model says so, and the rest traced again
        outcome = _trace(model, args, kwargs, dims, train=train, in_place=in_place)
        if isinstance(outcome, SymbolicTrace):
            return outcome
        dims = outcome


def plan_symbolic(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any,
    train: bool | None = None,
    **options: Any,
) -> SymbolicPlan:
    """`memplan.plan` with `dynamic_shapes`; `options` are those of `plan_traced`. Raises as `trace_symbolic` does, and
    `InvalidShapes` for a budget: what is evicted, and when, holds for one size only.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    train = bool(getattr(model, "training", True)) if train is None else train
    traced = trace_symbolic(model, args, example_kwargs or {}, dynamic_shapes=dynamic_shapes, train=train)
    return plan_of(traced, **options)


def plan_of(traced: SymbolicTrace, **options: Any) -> SymbolicPlan:
    """The symbolic plan of a symbolic trace; `options` are those of `plan_traced`."""
    if options.get("budget") is not None:
        hint = "give the budget without dynamic_shapes, for the largest shape; memplan.max_batch finds it"
        raise InvalidShapes("a budget's evictions hold for one size only", where="budget with dynamic_shapes", hint=hint)
    return make_symbolic(
        symbols=traced.symbols,
        sizes=traced.sizes,
        plan=plan_traced(traced.traced, **options),
        conditions=traced.conditions,
        inputs=[shape or () for shape in traced.leaves],
    )


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Dims, *, train: bool, in_place: bool
) -> SymbolicTrace | Dims:
    flat, spec = pytree.tree_flatten((args, kwargs))
    hints = _tracing_hints(model, flat, dims)
    with contextlib.ExitStack() as stack:
        prepare(stack, model, train=train)
        joint, translator = _capture(stack, model, flat, spec, dims, hints)
        got = captured(model, joint, spec, flat, train=train)
        builder = _read(got, type(model).__name__, translator)
        traced = builder.build()
        conditions = translator.conditions()
    writer = SizesWriter()
    kernels = tuple(builder.kernel(k, writer) for k in traced.kernels if isinstance(k, Kernel))
    sizes = writer.finish(builder.storage_texts(traced), builder.view_texts)
    pinned = _pinned(dims.symbols, hints, conditions)
    if pinned is not None:
        return _fixed(dims, pinned, translator)
    conditions = _telling(dims.symbols, conditions)
    names = [s.name for s in dims.symbols]
    example = {s.name: s.example for s in dims.symbols}
    if not all(evaluator(conditions, names)(*example.values())):
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
    graph = stable(with_chances(traced.graph), sizes) if in_place else traced.graph
    return replace(made, traced=replace(traced, graph=graph))


def _shape(x: torch.Tensor, varying: Mapping[int, Any]) -> tuple[str, ...]:
    return tuple(str(varying.get(i, int(n))) for i, n in enumerate(x.shape))


# -- what is traced --------------------------------------------------------------------------------------


def _tracing_hints(model: nn.Module, flat: Sequence[Any], dims: Dims) -> dict[str, int]:
    """A value in range for each symbol: near the example, and if possible equal to no other size that is around."""
    tensors = [*model.parameters(), *model.buffers(), *(x for x in flat if isinstance(x, torch.Tensor))]
    taken = {int(n) for t in tensors for n in t.shape} | {0, 1, 2}
    taken -= {s.example for s in dims.symbols} - {0, 1, 2}
    hints: dict[str, int] = {}
    for s in dims.symbols:
        near = sorted(range(max(s.min, s.example - 64), min(s.max, s.example + 64) + 1), key=lambda n: abs(n - s.example))
        found = next((n for n in near if n not in taken), None)
        if found is None:
            found = next((n for n in near if n not in {0, 1, *hints.values()}), s.example)
        hints[s.name] = found
        taken |= {found, found - 1, found + 1}
    return hints


def _capture(
    stack: contextlib.ExitStack,
    model: nn.Module,
    flat: Sequence[Any],
    spec: pytree.TreeSpec,
    dims: Dims,
    hints: Mapping[str, int],
) -> tuple[Any, Translator]:
    """AOTAutograd's joint graph, and the translator of its sizes into expressions of the user's symbols."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._guards import TracingContext, tracing

    leaves = [_stand_in(x, dims.leaves[i], hints) if isinstance(x, torch.Tensor) else x for i, x in enumerate(flat)]
    ranges = {s.name: s for s in dims.symbols}
    for x, varying in zip(leaves, dims.leaves, strict=True):
        for dim, v in varying.items():
            low, high = (v.at(n) for n in (max(ranges[v.symbol].min, 2), ranges[v.symbol].max))
            torch._dynamo.mark_dynamic(x, dim, min=max(low, 2), max=max(low, 2, min(high, 2**31 - 1)))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        module: Any = dynamo(model, args, kwargs)
        mode, context = module.meta["fake_mode"], module.meta["tracing_context"]
        env: ShapeEnv = mode.shape_env
        translator = Translator(env, dims.symbols)
        for x, varying in zip(leaves, dims.leaves, strict=True):
            found = context.tensor_to_context.get(x) if varying else None
            caches = [] if found is None else found.shape_env_to_source_to_symbol_cache.values()
            for name, symbol in (item for cache in caches for item in cache.items()):
                dim = int(name.rpartition("[")[2].rstrip("]")) if ".size()[" in name else -1
                if dim in varying:
                    translator.know(symbol, varying[dim])
        sizes = {s.name: _symint(env, s, hints[s.name], translator) for s in dims.symbols}
        fakes = [_fake(x, dims.leaves[i], sizes, mode) if isinstance(x, torch.Tensor) else x for i, x in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(fakes, spec)
        stack.enter_context(tracing(TracingContext(mode)))
        return aot_export_joint_with_descriptors(stack, module, args, kwargs, decompositions=AS_KERNELS_DO), translator
    except MemplanError:
        raise
    except Exception as error:  # whatever a front end raises
        raise _unsupported(model, error) from error


def _unsupported(model: nn.Module, error: Exception) -> MemplanError:
    found = unsupported(model, error)
    if "constraint" in type(error).__name__.lower() or "marked" in str(error):
        return InvalidShapes(found.reason, where="dynamic_shapes", hint="leave that dimension out of dynamic_shapes")
    hint = "without dynamic_shapes it may still be traced; on_mismatch='replan' then plans each new shape"
    return UnsupportedGraph(found.node, found.reason, f"{found.hint}; {hint}")


def _stand_in(x: torch.Tensor, varying: Mapping[int, Any], hints: Mapping[str, int]) -> torch.Tensor:
    """A tensor like the example's, of the sizes that are traced; only its shape is ever looked at."""
    if not varying:
        return x
    shape = [varying[i].at(hints[varying[i].symbol]) if i in varying else int(n) for i, n in enumerate(x.shape)]
    return torch.zeros(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def _symint(env: ShapeEnv, s: Range, hint: int, translator: Translator) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"memplan_{s.name}")
    bounds = StrictMinMaxConstraint(vr=ValueRanges(max(s.min, 2), max(s.max, 2)), warn_only=False)
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=bounds)
    translator.know_symbol(symbol, s.name)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _fake(x: torch.Tensor, varying: Mapping[int, Any], sizes: Mapping[str, Any], mode: Any) -> torch.Tensor:
    """The stand-in with symbols for sizes, in the mode of the trace."""
    if not varying:
        found: torch.Tensor = mode.from_tensor(x, static_shapes=True)
        return found
    shape = [
        varying[i].factor * sizes[varying[i].symbol] + varying[i].offset if i in varying else int(n)
        for i, n in enumerate(x.shape)
    ]
    with mode:
        made = torch.empty(shape, dtype=x.dtype, device=x.device)
    return made.requires_grad_(x.requires_grad)


# -- reading what was traced -----------------------------------------------------------------------------


def _read(got: Captured, model: str, translator: Translator) -> _SymbolicBuilder:
    """Run the passes over a graph whose sizes are symbols, with numbers that vary in its arguments, not as nodes."""
    graph = got.graph_module.graph
    _inline_sizes(graph)
    needs = tangents_needed(graph)
    write_back_mutations(graph, got.alias_of)
    lower(graph)
    own_the_results(graph)
    return _SymbolicBuilder(got, model, needs, translator)


def _inline_sizes(graph: fx.Graph) -> None:
    """Replace nodes that compute sizes by the sizes themselves."""

    def inlined(node: fx.Node) -> Any:
        return node.meta["val"] if isinstance(node.meta.get("val"), _SYMBOLIC) else node

    for node in graph.nodes:
        node.args = fx.node.map_arg(node.args, inlined)
        node.kwargs = fx.node.map_arg(node.kwargs, inlined)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and isinstance(node.meta.get("val"), _SYMBOLIC):
            graph.erase_node(node)
    _, results, _ = returned_by(graph)
    if any(isinstance(result, _SYMBOLIC) for result in results):
        raise UnsupportedGraph("output", "it returns a size, which varies", "return tensors; read sizes outside")


class _SymbolicBuilder(Builder):
    """Builds the graph for the tracing hints, and notes what each size is as an expression."""

    def __init__(self, got: Captured, model: str, needs: Mapping[Any, frozenset[int]], translator: Translator) -> None:
        super().__init__(got, model, needs)
        self.translator = translator
        self.view_texts: list[tuple[str, ...]] = []
        self._spans: list[list[sympy.Expr]] = []
        self._starts: list[Any] = []

    def _whole(self, size: Any, name: str) -> int:
        if isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                raise UnsupportedGraph(name, "a size that depends on data", "use fixed shapes")
            return int(size.node.hint)
        return super()._whole(size, name)

    def _value(self, val: torch.Tensor, name: str, storage: int) -> int:
        index = super()._value(val, name, storage)
        if storage == len(self._spans):
            made = self.start_of[storage] != 0
            self._starts.append(self.translator.expression(val.storage_offset()) if made else 0)
            self._spans.append([])
        shape, strides = ([self.translator.expression(n) for n in ns] for ns in (val.shape, val.stride()))
        offset = self.translator.expression(val.storage_offset()) - self._starts[storage]
        self.view_texts.append(tuple(map(self.translator.text, (*shape, *strides, offset))))
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        elements = sympy.S.Zero if 0 in shape else sympy.expand(offset + last + 1)
        self._spans[storage].append(elements * val.dtype.itemsize)
        return index

    def storage_texts(self, traced: TracedGraph) -> list[str]:
        """Bytes of each storage: the furthest end of its values."""
        assert len(traced.graph.storages) == len(self._spans)
        return [self.translator.text(self.translator.largest(spans)) for spans in self._spans]

    def kernel(self, kernel: Kernel, writer: SizesWriter) -> Kernel:
        """The kernel with `Sized`s in place of torch's symbolic numbers."""

        def sized(leaf: Any) -> Any:
            if isinstance(leaf, torch.SymInt):
                return Sized(writer.add(self.translator.text(self.translator.expression(leaf))))
            if isinstance(leaf, _SYMBOLIC):
                what = f"takes {leaf}, which varies with a size but is no whole number"
                raise UnsupportedGraph(str(kernel.target), what, "leave that dimension out of dynamic_shapes")
            return leaf

        args, kwargs = pytree.tree_map(sized, (kernel.args, kernel.kwargs))
        return replace(kernel, args=args, kwargs=kwargs)


# -- what the trace rests on -----------------------------------------------------------------------------


def _pinned(symbols: Sequence[Range], hints: Mapping[str, int], conditions: Sequence[str]) -> tuple[Range, str] | None:
    """The first symbol for which only one value is left, whatever the others are near, and the condition to blame."""
    names = [s.name for s in symbols]
    for s in symbols:
        tried = [n for n in range(max(s.min, hints[s.name] - 40), min(s.max, hints[s.name] + 40) + 1)]
        for text in conditions:
            holds = evaluator([text], names)
            left = sum(bool(holds(*({**hints, s.name: n}[name] for name in names))[0]) for n in tried)
            if left <= 1 < len(tried):
                return s, text
    return None


def _fixed(dims: Dims, pinned: tuple[Range, str], translator: Translator) -> Dims:
    """Without a symbol that the model fixes to its example's value. Raises `InvalidShapes` when it must vary."""
    s, text = pinned
    if s.strict:
        reason = translator.reason(text)
        what = f"the model fixes {s.name}: it was traced under the condition {text}{reason}"
        hint = f"leave {s.name} out of dynamic_shapes, write Dim.AUTO for it, or change that line"
        raise InvalidShapes(what, where=f"dynamic_shapes: {s.name}", hint=hint)
    rest = tuple(r for r in dims.symbols if r is not s)
    if not rest:
        raise InvalidShapes(f"the model fixes {s.name} ({text}), and nothing else varies", where="dynamic_shapes")
    leaves = tuple({d: v for d, v in leaf.items() if v.symbol != s.name} for leaf in dims.leaves)
    return Dims(symbols=rest, leaves=leaves)


def _telling(symbols: Sequence[Range], conditions: Sequence[str]) -> tuple[str, ...]:
    """The conditions without those that never say more than the ones before, as far as all shapes can be tried."""
    kept: list[str] = []
    for text in sorted(dict.fromkeys(conditions), key=lambda text: (len(text), text)):
        used = [s for s in symbols if s.name in _names(text)]
        names = [s.name for s in used]
        shapes = math.prod(s.max - s.min + 1 for s in used)
        known = evaluator([other for other in kept if _names(other) <= set(names)], names)
        holds = evaluator([text], names)
        every = itertools.product(*(range(s.min, s.max + 1) for s in used))
        if shapes > _FEW or any(all(known(*values)) and not holds(*values)[0] for values in every):
            kept.append(text)
    return tuple(kept)


def _names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
