"""Capture a symbolic trace: dynamo and AOTAutograd run on stand-ins whose sizes are symbols, and the result is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._guards import detect_fake_mode, tracing

from memplan.errors import InvalidShapes, MemplanError, UnsupportedGraph
from memplan.symbolic.sizes import SizesWriter
from memplan.torch_inside.dynamo import mark_varying
from memplan.trace.capture.front_ends import READINGS, dynamo
from memplan.trace.capture.joint_graph import captured, export_joint, prepare
from memplan.trace.capture.refusals import unsupported
from memplan.trace.dynamic.dims import Dims, Sized
from memplan.trace.dynamic.symbols import Translator
from memplan.trace.graph.values import AliasClasses
from memplan.trace.passes.own_outputs import own_outputs, returned_by
from memplan.trace.traced import KernelCall, TracedGraph
from memplan.trace.tracing import trace_captured

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def read_symbolic(
    model: nn.Module,
    flat: Sequence[Any],
    spec: pytree.TreeSpec,
    dims: Dims,
    hints: Mapping[str, int],
    *,
    train: bool,
    gradients_in_arena: bool = False,
    copy_gradients: bool = False,
) -> tuple[SymbolicAliasClasses, TracedGraph]:
    """Trace, run the passes and read the graph. Raises `UnsupportedGraph`.

    Returns the sizes, and the graph for the tracing hints. `gradients_in_arena`, `copy_gradients`: as in `trace`.
    """
    with contextlib.ExitStack() as stack:
        prepare(stack, model, train=train)
        leaves = [_stand_in(x, dims.leaves[i], hints) if isinstance(x, torch.Tensor) else x for i, x in enumerate(flat)]
        call = pytree.tree_unflatten(leaves, spec)
        joint, translator = _capture(stack, model, call, dims, hints)
        got = captured(model, joint, spec, flat, train=train)
        _inline_sizes(got.graph_module.graph)
        alias_classes = SymbolicAliasClasses(translator)
        finish = partial(own_outputs, copy_gradients=copy_gradients)
        name = type(model).__name__
        return alias_classes, trace_captured(
            got, name, finish, gradients_in_arena=gradients_in_arena, alias_classes=alias_classes
        )


def tracing_hints(model: nn.Module, flat: Sequence[Any], dims: Dims) -> dict[str, int]:
    """Return a value in range for each symbol: near the example, and if possible equal to no other size in use."""
    tensors = [*model.parameters(), *model.buffers(), *(x for x in flat if isinstance(x, torch.Tensor))]
    taken = {int(n) for t in tensors for n in t.shape} | {0, 1, 2}
    taken -= {s.example for s in dims.symbols} - {0, 1, 2}
    hints: dict[str, int] = {}
    for s in dims.symbols:
        near = range(max(s.min, s.example - 64), min(s.max, s.example + 64) + 1)
        found = min((n for n in near if n not in taken), key=lambda n: abs(n - s.example), default=s.example)
        hints[s.name] = found
        taken |= {found, found - 1, found + 1}
    return hints


def _capture(
    stack: contextlib.ExitStack, model: nn.Module, call: Any, dims: Dims, hints: Mapping[str, int]
) -> tuple[Any, Translator]:
    """Return AOTAutograd's joint graph of `call` (args, kwargs), and the translator from its sizes to the user's
    symbols.
    """
    stack.enter_context(mock.patch.object(torch._C, "_select_conv_backend", _choosing_for_all_sizes()))
    leaves = pytree.tree_leaves(call)
    ranges = {s.name: s for s in dims.symbols}
    for x, varying in zip(leaves, dims.leaves, strict=True):
        for dim, v in varying.items():
            low, high = (v.at(n) for n in (max(ranges[v.symbol].min, 2), ranges[v.symbol].max))
            mark_varying(x, dim, low, high)
    try:
        module: Any = dynamo(model, *call)
        context = module.meta["tracing_context"]
        translator = Translator(module.meta["fake_mode"].shape_env, dims.symbols)
        for x, varying in zip(leaves, dims.leaves, strict=True):
            found = context.tensor_to_context.get(x) if varying else None
            caches = [] if found is None else found.shape_env_to_source_to_symbol_cache.values()
            for name, symbol in (item for cache in caches for item in cache.items()):
                dim = int(name.rpartition("[")[2].rstrip("]")) if ".size()[" in name else -1
                if dim in varying:
                    translator.bind(symbol, varying[dim])
        stack.enter_context(tracing(context))  # whose symbols the sizes of the call have
        joint = export_joint(stack, module, *call)
        joint.graph_module.meta[READINGS] = module.meta[READINGS]
        return joint, translator
    except MemplanError:
        raise
    except Exception as error:  # whatever a front end raises
        raise _unsupported(model, error) from error


def _choosing_for_all_sizes() -> Callable[..., Any]:
    """Return what chooses the library of a convolution by the hints: no size decides what the step is."""
    choose = torch._C._select_conv_backend

    def chosen(*args: Any, **options: Any) -> Any:
        mode = detect_fake_mode((args, options))
        env = None if mode is None else mode.shape_env
        with contextlib.nullcontext() if env is None else env.suppress_guards():
            return choose(*args, **options)

    return chosen


def _unsupported(model: nn.Module, error: Exception) -> MemplanError:
    """Return the error for users, with a hint about dynamic shapes."""
    found = unsupported(model, error)
    if "constraint" in type(error).__name__.lower() or "marked" in str(error):
        return InvalidShapes(
            found.reason, where="dynamic_shapes", hint="leave that dimension out of dynamic_shapes", see="fixed-size"
        )
    hint = "without dynamic_shapes it may still be traced; on_mismatch='replan' then plans each new shape"
    return UnsupportedGraph(found.node, found.reason, f"{found.hint}; {hint}", see=found.see)


def _stand_in(x: torch.Tensor, varying: Mapping[int, Any], hints: Mapping[str, int]) -> torch.Tensor:
    """Return a tensor like the example's with the sizes that are traced; only its shape is ever read."""
    if not varying:
        return x
    shape = [varying[i].at(hints[varying[i].symbol]) if i in varying else int(n) for i, n in enumerate(x.shape)]
    return torch.zeros(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def _inline_sizes(graph: fx.Graph) -> None:
    """Replace nodes that compute sizes by the sizes themselves."""

    def inlined(node: fx.Node) -> Any:
        """Return the size that a node computes; any other node itself."""
        return node.meta["val"] if isinstance(node.meta.get("val"), _SYMBOLIC) else node

    for node in graph.nodes:
        node.args = fx.node.map_arg(node.args, inlined)
        node.kwargs = fx.node.map_arg(node.kwargs, inlined)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and isinstance(node.meta.get("val"), _SYMBOLIC):
            graph.erase_node(node)
    _, results, _ = returned_by(graph)
    if any(isinstance(result, _SYMBOLIC) for result in results):
        raise UnsupportedGraph(
            "output", "it returns a size, which varies", "return tensors; read sizes outside", see="varying"
        )


class SymbolicAliasClasses(AliasClasses):
    """The values and storages for the tracing hints, with each size recorded as an expression too.

    `view_texts`: shape, strides and offset of each value.
    """

    def __init__(self, translator: Translator) -> None:
        super().__init__()
        self.translator = translator
        self.view_texts: list[tuple[str, ...]] = []
        self._spans: list[list[sympy.Expr]] = []
        self._starts: list[Any] = []

    def whole(self, size: Any, name: str) -> int:
        """Return the hint of a symbolic size."""
        if isinstance(size, torch.SymInt):
            if not size.node.has_hint():
                raise UnsupportedGraph(
                    name, "a size that depends on data", "use fixed shapes", see="data-dependent-size"
                )
            return int(size.node.hint)
        return super().whole(size, name)

    def value(self, val: torch.Tensor, name: str, storage: int) -> int:
        """Add a value, with its shape, strides and offset as expressions, and return its index."""
        index = super().value(val, name, storage)
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

    def storage_texts(self) -> list[str]:
        """Return the bytes of each storage as an expression: the furthest end of its values."""
        assert len(self.storages) == len(self._spans)
        return [self.translator.text(self.translator.largest(spans)) for spans in self._spans]


def sized_kernel(kernel: KernelCall, translator: Translator, writer: SizesWriter) -> KernelCall:
    """Return the kernel with a `Sized` in place of each of torch's symbolic numbers."""

    def sized(leaf: Any) -> Any:
        """Return a `Sized` for a symbolic number; any other argument as it is."""
        if isinstance(leaf, torch.SymInt):
            return Sized(writer.add(translator.text(translator.expression(leaf))))
        if isinstance(leaf, _SYMBOLIC):
            what = f"takes {leaf}, which varies with a size but is not a whole number"
            raise UnsupportedGraph(
                str(kernel.target), what, "leave that dimension out of dynamic_shapes", see="varying"
            )
        return leaf

    args, kwargs = pytree.tree_map(sized, (kernel.args, kernel.kwargs))
    return replace(kernel, args=args, kwargs=kwargs)
