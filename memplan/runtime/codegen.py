"""Code generation: a bound step as straight-line Python, so that nothing is decided while it runs.

Tensors in the arena, parameters and constants are globals of the generated code: their addresses never
change, and all view ops are gone. Tensors whose address changes from call to call (inputs, outputs,
gradients, tangents) are locals, and so are views of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.graph import Graph, Value
from memplan.runtime.arena import dtype_of, view_within
from memplan.runtime.bind import BoundOp, Form
from memplan.trace.traced import Handed, Live, Ref

Hook = Callable[[], None]


@dataclass(slots=True)
class Namespace:
    """The globals of generated code: `v12` is value 12, `k3` a kernel, `c4` a constant, `g5` a hook."""

    names: dict[str, Any] = field(default_factory=dict)
    _known: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, prefix: str, thing: Any) -> str:
        """A name for `thing`; the same object gets the same name."""
        name = self._known.setdefault((prefix, id(thing)), f"{prefix}{len(self._known)}")
        self.names[name] = thing  # which keeps it alive, so that its id stays its own
        return name

    def define(self, source: str, function: str) -> Callable[..., Any]:
        """Compile `source` over these globals and return the function that it defines."""
        exec(compile(source, f"<memplan {function}>", "exec"), self.names)
        made: Callable[..., Any] = self.names[function]
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which values are static (globals), and the base (value index) of every dynamic storage (by index)."""

    graph: Graph
    static: frozenset[int]
    base_of: Mapping[int, int]
    fresh_storages: frozenset[int]
    autocast: bool


class FunctionWriter:
    """Writes one function: dynamic values come in as arguments, ops follow, values go out."""

    def __init__(self, name: str, layout: Layout, namespace: Namespace, arguments: Sequence[int]) -> None:
        self.name = name
        self.layout = layout
        self.namespace = namespace
        self.arguments = [f"v{a}" for a in arguments]
        self.local = set(arguments)
        self.lines: list[str] = []
        self.live: dict[str, str] = {}  # hyperparameters, read once per call

    def op(self, bound: BoundOp) -> None:
        """Call one op; its results land where their values live."""
        if _copies_onto_itself(self.layout.graph, bound):
            return
        unborn = self._unborn(bound) if bound.returns else None
        for ref in _refs((bound.args, bound.kwargs)):
            if ref != unborn:
                self._use(ref)
        if unborn is not None:
            self.lines.append(f"v{unborn} = {self._call(bound, without=bound.out_names)}")
            self.local.add(unborn)
        elif bound.form is not Form.FUNCTIONAL:
            self.lines.append(self._call(bound))
        elif not bound.several and bound.outs[0] in self.layout.static:
            copy = self.namespace.add("k", self.namespace.names[f"v{bound.outs[0]}"].copy_)
            self.lines.append(f"{copy}({self._call(bound)})")
        else:
            self._land(bound)

    def _unborn(self, bound: BoundOp) -> int | None:
        """The result, if it is the caller's and this op is the first that writes it."""
        out = bound.outs[0]
        if out is None or out in self.layout.static or out in self.local:
            return None
        return out if self.layout.base_of[self.layout.graph.values[out].storage] == out else None

    def _land(self, bound: BoundOp) -> None:
        """Copy fresh results to their place, or make them the caller's where they have none."""
        names = [f"r{i}" for i in range(len(bound.outs))]
        self.lines.append(f"{''.join(f'{n}, ' for n in names) if bound.several else names[0]} = {self._call(bound)}")
        for position, number in bound.hands:
            self.lines.append(f"{self._hands()}[{number}] = {names[position]}")
        for name, out in zip(names, bound.outs, strict=True):
            if out is None:
                continue
            if out not in self.layout.static and self.layout.base_of[self.layout.graph.values[out].storage] == out:
                self._adopt(out, name)
            else:
                self._use(out)
                self.lines.append(f"v{out}.copy_({name})")
        self.lines.append("del " + ", ".join(names))

    def hook(self, function: Hook) -> None:
        """Call `function()` here (guards)."""
        self.lines.append(f"{self.namespace.add('g', function)}()")

    def finish(self, groups: Iterable[Sequence[int]]) -> Callable[..., Any]:
        """Return a tuple of values per group, and compile."""
        parts = []
        for group in groups:
            for value in group:
                self._use(value)
            parts.append("(" + "".join(f"{self._leaving(value)}, " for value in group) + ")")
        body = [f"def {self.name}({', '.join(self.arguments)}):", f"    with {self._guards()}:"]
        read = [f"{name} = {source}" for source, name in self.live.items()]
        body += [f"        {line}" for line in (*read, *self.lines)] or ["        pass"]
        body.append(f"    return {', '.join(parts) if parts else '()'}")
        return self.namespace.define("\n".join(body), self.name)

    def _leaving(self, index: int) -> str:
        """A value for the caller: what stays in the arena leaves as another tensor over the same bytes."""
        if index not in self.layout.static:
            return f"v{index}"
        return f"{self.namespace.add('k', torch.Tensor.detach)}(v{index})"

    # -- values ------------------------------------------------------------------------------------------

    def _use(self, index: int) -> None:
        """Make sure that a dynamic value exists as a local: allocate its base, take a view of that."""
        if index in self.layout.static or index in self.local:
            return
        value = self.layout.graph.values[index]
        base = self.layout.base_of[value.storage]
        if base not in self.local:
            assert value.storage in self.layout.fresh_storages, f"value {index} is neither given nor the caller's"
            b = self.layout.graph.values[base]
            empty = self.namespace.add("k", torch.empty_strided)
            dtype, device = self._constant(dtype_of(b)), self._constant(self._device(b.storage))
            self.lines.append(f"v{base} = {empty}({b.shape!r}, {b.strides!r}, dtype={dtype}, device={device})")
            self.local.add(base)
        if index != base:
            self.lines.append(f"v{index} = {self._view(base, index)}")
            self.local.add(index)

    def _view(self, base: int, index: int) -> str:
        b, v = self.layout.graph.values[base], self.layout.graph.values[index]
        if (b.dtype, b.shape, b.strides, b.offset) == (v.dtype, v.shape, v.strides, v.offset):
            return f"v{base}"
        if b.dtype != v.dtype:
            view = self.namespace.add("k", partial(view_within, b, v))
            return f"{view}(v{base})"
        if _same_elements(b, v):
            return f"v{base}.view({v.shape!r})"
        start = "" if v.storage in self.layout.fresh_storages else f"v{base}.storage_offset() + "
        return f"v{base}.as_strided({v.shape!r}, {v.strides!r}, {start}{v.offset - b.offset})"

    def _adopt(self, index: int, result: str) -> None:
        """A fresh result becomes the caller's tensor itself, when it is laid out as planned."""
        v = self.layout.graph.values[index]
        if index in self.local:
            self.lines.append(f"v{index}.copy_({result})")
            return
        adopt = self.namespace.add("k", _adopt)
        self.lines.append(f"v{index} = {adopt}({result}, {v.shape!r}, {v.strides!r})")
        self.local.add(index)

    def _device(self, storage: int) -> torch.device:
        return torch.device(self.layout.graph.storages[storage].device)

    # -- expressions -------------------------------------------------------------------------------------

    def _call(self, bound: BoundOp, without: Sequence[str] = ()) -> str:
        arguments = [self._expression(a) for a in bound.args]
        arguments += [f"{name}={self._expression(a)}" for name, a in bound.kwargs.items() if name not in without]
        return f"{self.namespace.add('k', bound.function)}({', '.join(arguments)})"

    def _expression(self, thing: Any) -> str:
        if isinstance(thing, Ref):
            return f"v{thing.value}"
        if isinstance(thing, Handed):
            return f"{self._hands()}[{thing.number}]"
        if isinstance(thing, Live):
            item = "" if thing.item is None else f"[{thing.item}]"
            source = f"{self._constant(thing.optimizer)}.param_groups[{thing.group}][{thing.key!r}]{item}"
            return self.live.setdefault(source, f"h{len(self.live)}")
        if isinstance(thing, (list, tuple)):
            items = ", ".join(self._expression(item) for item in thing)
            return f"[{items}]" if isinstance(thing, list) else f"({items},)"
        plain = (
            thing is None or isinstance(thing, (bool, int, str)) or (isinstance(thing, float) and math.isfinite(thing))
        )
        return repr(thing) if plain else self._constant(thing)

    def _hands(self) -> str:
        """What is handed from kernel to kernel, by number: it belongs to the program, as its addresses do."""
        self.namespace.names.setdefault("handed", {})
        return "handed"

    def _constant(self, thing: Any) -> str:
        return self.namespace.add("c", thing)

    def _guards(self) -> str:
        """Below autograd, views and version counters; and no second cast where autocast was traced."""
        guards: list[type] = [torch._C._AutoDispatchBelowADInplaceOrView]
        guards += [torch._C._DisableAutocast] if self.layout.autocast else []
        return ", ".join(f"{self.namespace.add('k', guard)}()" for guard in guards)


def _refs(tree: Any) -> list[int]:
    return [leaf.value for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Ref)]


def _same_elements(one: Value, two: Value) -> bool:
    """Whether both are contiguous and start at the same place."""
    return (
        one.offset == two.offset
        and all(v.strides == tuple(math.prod(v.shape[i + 1 :]) for i in range(len(v.shape))) for v in (one, two))
        and math.prod(one.shape) == math.prod(two.shape) > 0
    )


def _copies_onto_itself(graph: Graph, bound: BoundOp) -> bool:
    """A copy whose source gave its bytes to the result (see `memplan.inplace`)."""
    if bound.function is not torch.Tensor.copy_:
        return False
    one, two = (graph.values[ref] for ref in _refs(bound.args))
    return (one.storage, one.dtype, one.shape, one.strides, one.offset) == (
        *(two.storage, two.dtype, two.shape, two.strides, two.offset),
    )


def _adopt(result: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    planned = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
    return planned.copy_(result)
