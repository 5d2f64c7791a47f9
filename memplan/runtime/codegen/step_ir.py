"""What a generated function is made of, before anyone decides who runs it: Python, or torch's own interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memplan.core.graph import Graph, Value
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.trace.traced import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which values are static (globals), and the base (value index) of every dynamic storage (by index).

    `placed`: the static values that stay where they are for good, in the arena and its copies on the host, and have
    dimensions (of constants without any, torch's interpreter may make numbers).
    `native`: runs of ops may go to torch's interpreter (`torchscript_runs.py`).
    """

    graph: Graph
    static: frozenset[int]
    placed: frozenset[int]
    base_of: Mapping[int, int]
    fresh_storages: frozenset[int]
    autocast: bool
    native: bool

    def base(self, index: int) -> int:
        """The value that spans the storage of a dynamic value."""
        return self.base_of[self.graph.values[index].storage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op. `fresh`: without its out arguments, it returns its result in memory of its own.

    Of what it returns, by position: `born` become values, `adopted` do too but may have to be laid out anew, `copied`
    are copied to where a value lives.
    """

    bound: BoundOp
    fresh: bool = False
    born: tuple[tuple[int, int], ...] = ()
    adopted: tuple[tuple[int, int], ...] = ()
    copied: tuple[tuple[int, int], ...] = ()

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it is called with."""
        without = self.bound.out_names if self.fresh else ()
        return self.bound.args, {name: a for name, a in self.bound.kwargs.items() if name not in without}

    @property
    def makes(self) -> tuple[int, ...]:
        """The values that exist from here on."""
        return tuple(value for _, value in (*self.born, *self.adopted))

    @property
    def uses(self) -> tuple[int, ...]:
        """The values that have to exist."""
        return (*refs(self.arguments), *(value for _, value in self.copied))


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """Memory for the caller, in the layout of value `value`."""

    value: int

    @property
    def makes(self) -> tuple[int, ...]:
        """The value itself."""
        return (self.value,)

    @property
    def uses(self) -> tuple[int, ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Value `value` as a view of `base`."""

    base: int
    value: int

    @property
    def makes(self) -> tuple[int, ...]:
        """The view."""
        return (self.value,)

    @property
    def uses(self) -> tuple[int, ...]:
        """Its base."""
        return (self.base,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooked:
    """`name()` is called."""

    name: str
    makes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()


Line = Call | Empty | View | Hooked


def refs(tree: Any) -> list[int]:
    """The values that arguments refer to."""
    if isinstance(tree, Ref):
        return [tree.value]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [value for item in tree for value in refs(item)]


def same_layout(one: Value, two: Value) -> bool:
    """Whether two values of one storage are the same tensor."""
    return (one.dtype, one.shape, one.strides, one.offset) == (two.dtype, two.shape, two.strides, two.offset)
