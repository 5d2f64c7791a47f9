"""The lines of a generated function, and its globals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan.core.graph import Graph
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.trace.traced import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Says which values are static (globals), and the base (value index) of every dynamic storage (by index).

    `fresh_storages`: the storages that ops allocate; the caller will own them, but for those in `released`, activations
    outside the arena, which are released after their last use. `pinned`: results on the host are allocated in
    page-locked memory, because an accelerator copies them there.
    """

    graph: Graph
    static: frozenset[int]
    base_of: Mapping[int, int]
    fresh_storages: frozenset[int]
    released: frozenset[int]
    autocast: bool
    pinned: bool

    def base(self, index: int) -> int:
        """Return the value that spans the storage of a dynamic value."""
        return self.base_of[self.graph.values[index].storage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The call of one op. `fresh`: it is called without its out arguments and returns its result in new memory.

    Its results, as (position, value): `born` become values, `adopted` become values after a copy if their strides are
    not as planned, and `copied` are copied to the place of a value.
    """

    bound: BoundOp
    fresh: bool = False
    born: tuple[tuple[int, int], ...] = ()
    adopted: tuple[tuple[int, int], ...] = ()
    copied: tuple[tuple[int, int], ...] = ()

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments of the call."""
        without = self.bound.out_names if self.fresh else ()
        return self.bound.args, {name: a for name, a in self.bound.kwargs.items() if name not in without}

    @property
    def makes(self) -> tuple[int, ...]:
        """The values that exist after this line."""
        return tuple(value for _, value in (*self.born, *self.adopted))

    @property
    def uses(self) -> tuple[int, ...]:
        """The values that must exist before this line."""
        return (*refs(self.arguments), *(value for _, value in self.copied))


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """Allocates memory that the caller will own, in the layout of `value`."""

    value: int

    @property
    def makes(self) -> tuple[int, ...]:
        """The value that is allocated."""
        return (self.value,)

    @property
    def uses(self) -> tuple[int, ...]:
        """No values."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Makes `value` as a view of `base`."""

    base: int
    value: int

    @property
    def makes(self) -> tuple[int, ...]:
        """The value of the view."""
        return (self.value,)

    @property
    def uses(self) -> tuple[int, ...]:
        """The base of the view."""
        return (self.base,)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackLine:
    """Calls the callback `name()`."""

    name: str
    makes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()


Line = Call | Empty | View | CallbackLine


def refs(tree: Any) -> list[int]:
    """Return the values that arguments refer to."""
    if isinstance(tree, Ref):
        return [tree.value]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [value for item in tree for value in refs(item)]


@dataclass(slots=True)
class Namespace:
    """The globals of generated code.

    `v12` is value 12, `k3` a kernel, `c4` a constant, `g5` a callback.
    """

    names: dict[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, prefix: str, thing: Any) -> str:
        """Return a name for `thing`; the same object gets the same name."""
        name = self._known.setdefault((prefix, id(thing)), f"{prefix}{len(self._known)}")
        self.names[name] = thing  # keeps it alive, so that no other object gets its id
        return name

    def move(self, value: int, tensor: torch.Tensor) -> None:
        """Replace the tensor of a value."""
        self.names[f"v{value}"] = tensor

    def define(self, source: str, function: str) -> Callable[..., Any]:
        """Compile `source` over these globals and return the function that it defines."""
        exec(compile(source, f"<memplan {function}>", "exec"), self.names)
        made: Callable[..., Any] = self.names[function]
        return made
