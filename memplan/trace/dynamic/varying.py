"""A step traced for a range of shapes: sizes as expressions, and the kernel arguments that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import ShapeOutOfRange
from memplan.symbolic.expression import Evaluate
from memplan.symbolic.sizes import Sizes, graph_at
from memplan.symbolic.symbols import Symbol
from memplan.trace.dynamic.dims import Dims
from memplan.trace.traced import KernelCall, TracedGraph


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
