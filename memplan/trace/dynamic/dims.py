"""Read `dynamic_shapes=` in torch.export's notation: which dimensions of which inputs vary, and in which range.

By the names of forward's arguments: `{"tokens": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}}` with `batch, seq =
Dim("batch", min=1, max=64), Dim("seq", max=1024)`; by position: `({0: batch}, None)`; multiples of a dimension:
`{"image": {0: batch, 2: 8 * side, 3: 8 * side}}`; named by memplan, and static where the model needs it: `{"tokens":
(Dim.AUTO, Dim.AUTO)}`. `SymbolicTrace` is a step traced for a range of shapes: sizes as expressions, and the kernel
arguments that follow from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.errors import InvalidShapes, ShapeOutOfRange
from memplan.symbolic.sizes import Evaluate, Sizes, Symbol, graph_at
from memplan.trace.traced import KernelCall, TracedGraph

_HIGHEST = 2**31 - 1
_HINT = "see torch.export's dynamic_shapes: {'argument': {0: Dim('batch', min=1, max=64)}}"
_EXAMPLE = 'Dim("batch", min=1, max=64)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Varying:
    """The size of an input's dimension that varies: `factor` * symbol + `offset`."""

    symbol: str
    factor: int = 1
    offset: int = 0

    def at(self, value: int) -> int:
        """Return the size for this value of the symbol."""
        return self.factor * value + self.offset

    def __str__(self) -> str:
        text = self.symbol if self.factor == 1 else f"{self.factor}*{self.symbol}"
        return text if not self.offset else f"{text} {'+' if self.offset > 0 else '-'} {abs(self.offset)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values that a symbol may have.

    `example`: its value in the example. `strict`: raise an error if the model fixes it.
    """

    name: str
    min: int
    max: int
    example: int
    strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """The dimensions that vary. `leaves[i]`: those of leaf i of the flattened (args, kwargs), by dimension."""

    symbols: tuple[Range, ...]
    leaves: tuple[Mapping[int, Varying], ...]


def read_dims(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Dims:
    """Return what `dynamic_shapes` says for a call of `model`.

    Raises `InvalidShapes` for the part that makes no sense.
    """
    flat, spec = pytree.tree_flatten((args, kwargs))
    numbered = pytree.tree_unflatten(list(range(len(flat))), spec)
    reader = _Reader(flat)
    for path, part, numbers in _by_argument(model, numbered, given):
        reader.read(path, part, numbers)
    return reader.finish()


def _by_argument(model: nn.Module, numbered: Any, given: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, its entry of `dynamic_shapes`, the numbers of its leaves) for each argument."""
    args, kwargs = numbered
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError) as error:
        hint = "pass example_inputs and example_kwargs with which model(*inputs, **kwargs) runs"
        raise InvalidShapes(f"forward does not take the example: {error}", where="dynamic_shapes", hint=hint) from error
    if isinstance(given, Mapping):
        for name in given:
            if name not in bound:
                hint = f"forward has been given: {', '.join(bound)}"
                raise InvalidShapes(f"there is no argument {name!r}", where="dynamic_shapes", hint=hint)
        for name, part in given.items():
            yield f"dynamic_shapes[{name!r}]", part, bound[name]
        return
    if not isinstance(given, (tuple, list)):
        raise InvalidShapes(f"is a {type(given).__name__}", where="dynamic_shapes", hint=_HINT)
    if len(given) != len(bound):
        what = f"has {len(given)} entries for {len(bound)} arguments"
        raise InvalidShapes(what, where="dynamic_shapes", hint="give one for each, None where nothing varies")
    for i, (part, numbers) in enumerate(zip(given, bound.values(), strict=True)):
        yield f"dynamic_shapes[{i}]", part, numbers


class _Reader:
    """Collects the symbols and what varies of each leaf."""

    def __init__(self, flat: list[Any]) -> None:
        self.flat = flat
        self.ranges: dict[str, Range] = {}
        self.leaves: list[dict[int, Varying]] = [{} for _ in flat]

    def read(self, path: str, part: Any, numbers: Any) -> None:
        """Record what `part` says of the leaves whose numbers are in the tree `numbers`."""
        if part is None:
            return
        if isinstance(numbers, int):
            if not isinstance(self.flat[numbers], torch.Tensor):
                raise InvalidShapes("is given for an argument that is not a tensor", where=path, hint="use None for it")
            self._tensor(path, part, numbers)
            return
        children = list(numbers.items()) if isinstance(numbers, Mapping) else list(enumerate(numbers))
        parts = part if isinstance(part, Mapping) else dict(enumerate(part)) if isinstance(part, (list, tuple)) else {}
        unknown = set(parts) - {key for key, _ in children}
        if unknown or not parts:
            raise InvalidShapes(f"does not match the argument, which has {len(children)} parts", where=path, hint=_HINT)
        for key, child in children:
            self.read(f"{path}[{key!r}]", parts.get(key), child)

    def _tensor(self, path: str, part: Any, number: int) -> None:
        """Record what `part` says of the dimensions of one tensor."""
        tensor = self.flat[number]
        if not isinstance(part, (Mapping, tuple, list)):
            raise InvalidShapes(f"is {part!r}, not a dict from dimensions to Dims", where=path, hint=_HINT)
        entries = part if isinstance(part, Mapping) else dict(enumerate(part))
        if not isinstance(part, Mapping) and len(part) != tensor.dim():
            raise InvalidShapes(f"has {len(part)} entries for {tensor.dim()} dimensions", where=path, hint=_HINT)
        for dim, said in entries.items():
            where = f"{path}[{dim!r}]"
            if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
                raise InvalidShapes(f"the tensor has {tensor.dim()} dimensions", where=where, hint=_HINT)
            self._dim(where, said, number, dim % tensor.dim())

    def _dim(self, where: str, said: Any, number: int, dim: int) -> None:
        """Record what `said` says of one dimension."""
        size = int(self.flat[number].shape[dim])
        kind = getattr(getattr(said, "type", None), "name", None)  # the kind of Dim.AUTO, Dim.DYNAMIC and Dim.STATIC
        if said is None or kind == "STATIC":
            return
        if type(said) is int:
            if said != size:
                hint = "a number fixes a size: write the example's, or a Dim for one that varies"
                raise InvalidShapes(f"is {said}, the example has {size}", where=where, hint=hint)
            return
        if kind in ("AUTO", "DYNAMIC"):
            name = f"in{number}_dim{dim}"
            self._symbol(where, name, said.min, said.max, size, strict=kind == "DYNAMIC")
            self.leaves[number][dim] = Varying(symbol=name)
            return
        if not hasattr(said, "__name__") or not hasattr(said, "min"):
            raise InvalidShapes(f"{said!r} is not a Dim", where=where, hint=f"write {_EXAMPLE}, an int or None")
        root = getattr(said, "root", said)
        varying = Varying(symbol=root.__name__, **_linear(said, where))
        value, rest = divmod(size - varying.offset, varying.factor)
        if rest:
            raise InvalidShapes(f"is {varying}, the example has {size}", where=where, hint="choose another example")
        self._symbol(where, root.__name__, root.min, root.max, value, strict=True)
        self.leaves[number][dim] = varying

    def _symbol(self, where: str, name: str, low: Any, high: Any, example: int, *, strict: bool) -> None:
        """Record a symbol and its range. Raises `InvalidShapes` if that contradicts what is known of it."""
        found = Range(
            name=name,
            min=max(int(low or 0), 1),
            max=_HIGHEST if high is None or not high < _HIGHEST else int(high),
            example=example,
            strict=strict,
        )
        known = self.ranges.setdefault(name, found)
        if known.example != example:
            what = f"{name} is {known.example} and {example} in one example"
            raise InvalidShapes(what, where=where, hint="dimensions of one Dim are always equal; use two Dims")
        if (known.min, known.max) != (found.min, found.max):
            raise InvalidShapes(f"there are two Dims of the name {name!r}", where=where, hint="give each its own name")
        if not found.min <= example <= found.max:
            what = f"{name} is {example} in the example, outside of {found.min}..{found.max}"
            raise InvalidShapes(what, where=where, hint="widen the range, or choose another example")

    def finish(self) -> Dims:
        """Return the result. Raises `InvalidShapes` if no dimension varies."""
        if not self.ranges:
            hint = f"name what varies, as in {{'tokens': {{0: {_EXAMPLE}}}}}, or leave dynamic_shapes out"
            raise InvalidShapes("no dimension varies", where="dynamic_shapes", hint=hint)
        return Dims(symbols=tuple(self.ranges.values()), leaves=tuple(self.leaves))


def without(dims: Dims, names: Collection[str]) -> Dims:
    """Return the dims with these symbols fixed to the example's sizes.

    Raises `InvalidShapes` if nothing is left to vary.
    """
    rest = tuple(s for s in dims.symbols if s.name not in names)
    if not rest:
        what = f"the model works for one size of {', '.join(names)} only, and nothing else varies"
        raise InvalidShapes(what, where="dynamic_shapes", hint="leave dynamic_shapes out", see="fixed-size")
    leaves = tuple({d: v for d, v in leaf.items() if v.symbol not in names} for leaf in dims.leaves)
    return Dims(symbols=rest, leaves=leaves)


def _linear(said: Any, where: str) -> dict[str, int]:
    """Return `factor` and `offset` of a derived Dim such as 2*batch + 1."""
    if not hasattr(said, "root"):
        return {}
    offset = int(said.fn(0))
    return {"factor": int(said.fn(1)) - offset, "offset": offset}


@dataclass(frozen=True, slots=True)
class Sized:
    """A kernel argument: the number that an expression gives (an index into `Sizes.expressions`)."""

    place: int


@dataclass(frozen=True, kw_only=True)
class SymbolicTrace:
    """A step traced for every value of its symbols under the conditions.

    `traced` is the step for the hints; its kernels are those of `kernels` with numbers in place of each `Sized`.
    `leaves`: for each leaf of the call, the shape as expressions (None: no tensor).
    """

    symbols: tuple[Symbol, ...]
    conditions: tuple[str, ...]
    traced: TracedGraph
    kernels: tuple[KernelCall, ...]
    sizes: Sizes
    dims: Dims
    leaves: tuple[tuple[str, ...] | None, ...]
    evaluate: Evaluate

    def values_of(self, flat: Sequence[Any]) -> dict[str, int]:
        """Return the values of the symbols in a call with these leaves. Raises `ShapeOutOfRange` if there are none."""
        found: dict[str, int] = {}
        for i, varying in enumerate(self.dims.leaves):
            for dim, v in varying.items():
                x = flat[i]
                if not isinstance(x, torch.Tensor) or x.dim() <= dim:
                    raise ShapeOutOfRange("is not a tensor with that number of dimensions", where=f"input {i}")
                value, rest = divmod(int(x.shape[dim]) - v.offset, v.factor)
                if rest or found.setdefault(v.symbol, value) != value:
                    what = f"dimension {dim} is {x.shape[dim]}, the plan was made for {v}"
                    if not rest:
                        what += f" with {v.symbol}={found[v.symbol]}"
                    raise ShapeOutOfRange(what, where=f"input {i}", hint="see dynamic_shapes")
        return {s.name: found[s.name] for s in self.symbols}

    def at(self, values: Mapping[str, int], flat: Sequence[Any]) -> TracedGraph:
        """Return the traced step for these values, with `flat` as its example.

        This takes milliseconds: nothing is traced again.
        """
        numbers = self.evaluate(*(values[s.name] for s in self.symbols))

        def filled(leaf: Any) -> Any:
            """Return the number of a `Sized`; any other argument as it is."""
            return numbers[leaf.place] if isinstance(leaf, Sized) else leaf

        def kernel(k: KernelCall) -> KernelCall:
            """Return a kernel with its numbers."""
            args, kwargs = pytree.tree_map(filled, (k.args, k.kwargs))
            return replace(k, args=args, kwargs=kwargs)

        return replace(
            self.traced,
            graph=graph_at(self.traced.graph, self.sizes, numbers),
            kernels=tuple(map(kernel, self.kernels)),
            example_inputs=tuple(flat),
        )


def same_step(one: SymbolicTrace, two: SymbolicTrace) -> bool:
    """Return whether two traces of a model are the same step, names aside: ops, numbers, sizes, and who owns what."""

    def compared(trace: SymbolicTrace) -> Any:
        """Return everything that is compared."""
        graph, texts = trace.traced.graph, trace.sizes.expressions
        views = [tuple(texts[p] for p in view) for view in trace.sizes.views]
        kernels = [
            str(pytree.tree_map(lambda x: texts[x.place] if isinstance(x, Sized) else x, (k.target, k.args, k.kwargs)))
            for k in trace.kernels
        ]
        return (
            [(op.target, op.phase, op.reads, op.writes, op.direct, op.random, op.unrelated) for op in graph.ops],
            [(v.storage, v.dtype, view) for v, view in zip(graph.values, views, strict=True)],
            [
                (s.kind, s.device, s.planned, texts[p])
                for s, p in zip(graph.storages, trace.sizes.storages, strict=True)
            ],
            (graph.outputs, graph.gradients, kernels, trace.traced.results),
        )

    return bool(compared(one) == compared(two))
