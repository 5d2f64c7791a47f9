"""Read `dynamic_shapes=` in torch.export's notation: which dimensions of which inputs vary, and in which range.

By the names of forward's arguments: `{"tokens": {0: batch, 1: seq}, "mask": {0: batch, 1: seq}}` with `batch, seq =
Dim("batch", min=1, max=64), Dim("seq", max=1024)`; by position: `({0: batch}, None)`; multiples of a dimension:
`{"image": {0: batch, 2: 8 * side, 3: 8 * side}}`; named by memplan, and static where the model needs it: `{"tokens":
(Dim.AUTO, Dim.AUTO)}`. `SymbolicTrace` is a step traced for a range of shapes: sizes as expressions, and the kernel
arguments that follow from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.export.dynamic_shapes import _check_dynamic_shapes, _combine_args, _tree_map_with_path
from torch.utils._pytree import keystr

from memplan.errors import InvalidShapes, ShapeOutOfRange
from memplan.symbolic.sizes import Evaluate, Sizes, Symbol, graph_at
from memplan.trace.traced import KernelCall, TracedGraph, named_leaves

_HIGHEST = 2**31 - 1
_HINT = "see torch.export's dynamic_shapes: {'argument': {0: Dim('batch', min=1, max=64)}}"


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
    """The dimensions that vary. `leaves[i]`: those of leaf i of the flattened (args, kwargs), by dimension.

    `names[i]`: its name in messages.
    """

    symbols: tuple[Range, ...]
    leaves: tuple[Mapping[int, Varying], ...]
    names: tuple[str, ...]


def read_dims(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> Dims:
    """Return what `dynamic_shapes` says for a call of `model`, with torch's own checks of it.

    An argument that it does not name is fixed. Raises `InvalidShapes` for the part that makes no sense.
    """
    flat, spec = pytree.tree_flatten((args, kwargs))
    reader = _Reader(flat)
    try:
        bound, numbers = (_combine_args(model, *pytree.tree_unflatten(of, spec)) for of in (flat, range(len(flat))))
        parts = dict(given) if isinstance(given, Mapping) else dict(zip(bound, given, strict=True))
        parts = {name: part for name, part in parts.items() if part is not None}
        unknown = next((name for name in parts if name not in bound), None)
        if unknown is not None:
            what, hint = f"there is no argument {unknown!r}", f"forward has been given: {', '.join(bound)}"
            raise InvalidShapes(what, where="dynamic_shapes", hint=hint)
        _check_dynamic_shapes({name: bound[name] for name in parts}, parts)
        _tree_map_with_path(reader.read, {name: numbers[name] for name in parts}, parts, tree_name="inputs")
    except InvalidShapes:
        raise
    except Exception as error:  # whatever torch raises
        raise InvalidShapes(str(error).splitlines()[0], where="dynamic_shapes", hint=_HINT) from error
    if not reader.ranges:
        hint = "name what varies, as in {'tokens': {0: Dim('batch', min=1, max=64)}}, or leave dynamic_shapes out"
        raise InvalidShapes("no dimension varies", where="dynamic_shapes", hint=hint)
    names = tuple(name for name, _ in named_leaves(args, kwargs, model.forward))
    return Dims(symbols=tuple(reader.ranges.values()), leaves=tuple(reader.leaves), names=names)


class _Reader:
    """Collects the symbols and what varies of each leaf."""

    def __init__(self, flat: list[Any]) -> None:
        self.flat = flat
        self.ranges: dict[str, Range] = {}
        self.leaves: list[dict[int, Varying]] = [{} for _ in flat]

    def read(self, path: Any, number: int, part: Any) -> None:
        """Record what `part` says of the dimensions of a leaf."""
        for dim, said in part.items() if isinstance(part, Mapping) else enumerate(part or ()):
            tensor, where = self.flat[number], f"dynamic_shapes{keystr(path)}[{dim!r}]"
            self._dim(where, said, number, range(tensor.dim())[dim])

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
        root, offset, factor = said, 0, 1
        if hasattr(said, "root"):  # a derived Dim such as 2*batch + 1
            root, offset = said.root, int(said.fn(0))
            factor = int(said.fn(1)) - offset
        varying = Varying(symbol=root.__name__, factor=factor, offset=offset)
        value, rest = divmod(size - offset, factor)
        if rest:
            raise InvalidShapes(f"is {varying}, the example has {size}", where=where, hint="choose another example")
        self._symbol(where, root.__name__, root.min, root.max, value, strict=True)
        self.leaves[number][dim] = varying

    def _symbol(self, where: str, name: str, low: Any, high: Any, example: int, *, strict: bool) -> None:
        """Record a symbol and its range. Raises `InvalidShapes` if that contradicts what is known of it."""
        high = _HIGHEST if high is None or not high < _HIGHEST else int(high)
        found = Range(name=name, min=max(int(low or 0), 1), max=high, example=example, strict=strict)
        known = self.ranges.setdefault(name, found)
        if known.example != example:
            what = f"{name} is {known.example} and {example} in one example"
            raise InvalidShapes(what, where=where, hint="dimensions of one Dim are always equal; use two Dims")
        if not found.min <= example <= found.max:
            what = f"{name} is {example} in the example, outside of {found.min}..{found.max}"
            raise InvalidShapes(what, where=where, hint="widen the range, or choose another example")


def without(dims: Dims, names: Collection[str]) -> Dims:
    """Return the dims with these symbols fixed to the example's sizes.

    Raises `InvalidShapes` if nothing is left to vary.
    """
    rest = tuple(s for s in dims.symbols if s.name not in names)
    if not rest:
        what = f"the model works for one size of {', '.join(names)} only, and nothing else varies"
        raise InvalidShapes(what, where="dynamic_shapes", hint="leave dynamic_shapes out", see="fixed-size")
    leaves = tuple({d: v for d, v in leaf.items() if v.symbol not in names} for leaf in dims.leaves)
    return replace(dims, symbols=rest, leaves=leaves)


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
                    what = "is not a tensor with that number of dimensions"
                    raise ShapeOutOfRange(what, where=self.dims.names[i])
                value, rest = divmod(int(x.shape[dim]) - v.offset, v.factor)
                if rest or found.setdefault(v.symbol, value) != value:
                    what = f"dimension {dim} is {x.shape[dim]}, the plan was made for {v}"
                    if not rest:
                        what += f" with {v.symbol}={found[v.symbol]}"
                    raise ShapeOutOfRange(what, where=self.dims.names[i], hint="see dynamic_shapes")
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
