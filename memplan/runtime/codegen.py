"""Generates straight-line Python from a bound step, so that nothing is decided while it runs.

Tensors in the arena, parameters and constants are globals of the generated code, which contains no view ops of them: no
call changes their addresses. Tensors whose address changes from call to call (inputs, outputs, gradients, tangents) are
locals, and so are views of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memplan.core.graph import Graph, Value
from memplan.core.in_place import same_layout
from memplan.devices.kinds import HOST
from memplan.runtime.kernels import BoundOp, CallForm
from memplan.runtime.memory.arena import dtype_of, view_within
from memplan.trace.traced import Live, OpaqueResult, Ref

Callback = Callable[[], object]

LEFT = "left_outside"  # global list: activations outside the arena between a forward and its backward


class FunctionWriter:
    """Generates one function: its arguments are dynamic values, its body calls ops, and it returns values.

    `taken` are values that another function of the program has left: memory outside the arena that nobody else refers
    to, so that it is freed after its last use.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        namespace: Namespace,
        arguments: Sequence[int],
        taken: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.layout = layout
        self.namespace = namespace
        self.arguments = arguments
        self.taken, self.left = taken, tuple[int, ...]()
        self.known = {*arguments, *taken}
        self.views: list[str] = []  # views of arguments: they come first
        self.lines: list[Line] = []
        self.live: dict[str, str] = {}  # hyperparameters, read once per call

    def op(self, bound: BoundOp) -> None:
        """Add the call of one op, whose results go to where their values are."""
        if _copies_onto_itself(self.layout.graph, bound):
            return
        used = refs((bound.args, bound.kwargs))
        for value in used:
            self._use(value)
        if bound.form is CallForm.FUNCTIONAL:
            self._place_results(bound)
        else:
            self._add(Line((self._call(bound),), (), tuple(used)))

    def _place_results(self, bound: BoundOp) -> None:
        """Copy new results to the places of their values, or return them to the caller if they have none."""
        results = [f"r{i}" for i in range(len(bound.outs))]
        makes, copied, after = list[int](), list[int](), list[str]()
        for result, out in zip(results, bound.outs, strict=True):
            if out is None:
                continue
            if out not in self.layout.static and self.layout.base(out) in makes:  # a tensor that is returned twice
                makes.append(out)
                after.append(f"v{out} = {self._view(self.layout.base(out), out)}")
                continue
            if out in self.layout.static or out in self.known or self.layout.base(out) != out:
                self._use(out)
                copied.append(out)
                after.append(f"v{out}.copy_({result})")
            else:
                makes.append(out)
                after.append(f"v{out} = {self._adopted(out, result)}")
        call = self._call(bound)
        if not bound.returns_sequence and copied and copied[0] in self.layout.static:
            source = [f"v{copied[0]}.copy_({call})"]
        else:
            opaque = [f"{self._opaque_results()}[{n}] = {results[position]}" for position, n in bound.opaque_results]
            names = "".join(f"{n}, " for n in results) if bound.returns_sequence else results[0]
            source = [f"{names} = {call}", *opaque, *after, "del " + ", ".join(results)]
        self._add(Line(tuple(source), tuple(makes), (*refs((bound.args, bound.kwargs)), *copied)))

    def callback(self, function: Callback) -> None:
        """Add a call of `function()` here (sanitizers, hooks)."""
        self._add(Line((f"{self.namespace.add('g', function)}()",)))

    def finish(self, groups: Sequence[Sequence[int]], *, left: Sequence[int] = ()) -> Callable[..., Any]:
        """Compile the function, which returns a tuple of values for each group, and leaves `left` to another one."""
        self.left = tuple(left)
        kept = [value for group in (*groups, left) for value in group]
        for value in kept:
            self._use(value)
        parts = ["(" + "".join(f"{self._returned(value)}, " for value in group) + ")" for group in groups]
        lines = self._written()
        body = [f"{name} = {source}" for source, name in self.live.items()] + self._take() + lines
        body = _indented(f"with {self._dispatch_contexts()}:", body or ["pass"])
        arguments = ", ".join(f"v{a}" for a in self.arguments)
        if self.left:
            body.append(f"{LEFT}.extend(({', '.join(f'v{value}' for value in self.left)},))")
        body.append(f"return {', '.join(parts) if parts else '()'}")
        return self.namespace.define("\n".join(_indented(f"def {self.name}({arguments}):", body)), self.name)

    def _returned(self, index: int) -> str:
        """Return the expression of a returned value: a static value is returned as another tensor over its bytes."""
        if index not in self.layout.static:
            return f"v{index}"
        return f"{self.namespace.add('k', torch.Tensor.detach)}(v{index})"

    def _take(self) -> list[str]:
        """Return the lines that take what was left, or that drop what a forward without a backward has left."""
        if not self.taken and not self.left:
            return []
        self.namespace.names.setdefault(LEFT, [])
        names = [f"{', '.join(f'v{value}' for value in self.taken)}, = {LEFT}"] if self.taken else []
        return [*names, f"{LEFT}.clear()"]

    # -- values ------------------------------------------------------------------------------------------

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.known.update(line.makes)

    def _use(self, index: int) -> None:
        """Make sure that a dynamic value exists as a local: allocate its base, and add a view of it, if needed."""
        if index in self.layout.static or index in self.known:
            return
        base = self.layout.base(index)
        if base not in self.known:
            fresh = self.layout.graph.values[index].storage in self.layout.fresh_storages
            assert fresh, f"value {index} is neither an argument nor owned by the caller"
            self._add(Line((f"v{base} = {self._empty(self.layout.graph.values[base])}",), (base,)))
        if index != base:
            view = f"v{index} = {self._view(base, index)}"
            if base in self.arguments:
                self.views.append(view)
                self.known.add(index)
            else:
                self._add(Line((view,), (index,), (base,)))

    # -- lines -------------------------------------------------------------------------------------------

    def _written(self) -> list[str]:
        """Return the source of the lines, with what is released after each."""
        written = list(self.views)
        dead = self._last_lines()
        names = set(self.taken)
        for position, line in enumerate(self.lines):
            written += line.source
            names.update(line.makes)
            gone = sorted(v for v in names if self.layout.graph.values[v].storage in dead.get(position, ()))
            if gone:
                written.append(f"del {', '.join(f'v{v}' for v in gone)}")
                names.difference_update(gone)
        return written

    def _last_lines(self) -> dict[int, set[int]]:
        """Return the storages to release, by the line (index) after which nothing uses them."""
        found: dict[int, int] = {}
        released = self.layout.released - {self.layout.graph.values[value].storage for value in self.left}
        for i, line in enumerate(self.lines):
            for value in (*line.makes, *line.uses):
                if (storage := self.layout.graph.values[value].storage) in released:
                    found[storage] = i
        lines = defaultdict[int, set[int]](set)
        for storage, i in found.items():
            lines[i].add(storage)
        return lines

    def _empty(self, value: Value) -> str:
        empty = self.namespace.add("k", torch.empty_strided)
        device = torch.device(self.layout.graph.storages[value.storage].device)
        how = f"dtype={self._constant(dtype_of(value))}"
        if self.layout.locked is not None and device.type == HOST:
            empty = self.namespace.add("k", self.layout.locked)
        else:
            how += f", device={self._constant(device)}"
        return f"{empty}({value.shape!r}, {value.strides!r}, {how})"

    def _view(self, base: int, index: int) -> str:
        b, v = self.layout.graph.values[base], self.layout.graph.values[index]
        if same_layout(b, v):
            return f"v{base}"
        if b.dtype != v.dtype:
            view = self.namespace.add("k", partial(view_within, b, v))
            return f"{view}(v{base})"
        if _same_elements(b, v):
            return f"v{base}.view({v.shape!r})"
        start = "" if v.storage in self.layout.fresh_storages else f"v{base}.storage_offset() + "
        return f"v{base}.as_strided({v.shape!r}, {v.strides!r}, {start}{v.offset - b.offset})"

    def _adopted(self, index: int, result: str) -> str:
        """Return the expression that gives a new result to the caller, copied if its strides are not as planned."""
        v = self.layout.graph.values[index]
        return f"{self.namespace.add('k', _adopt)}({result}, {v.shape!r}, {v.strides!r})"

    # -- expressions -------------------------------------------------------------------------------------

    def _call(self, bound: BoundOp) -> str:
        """Return the expression of a call."""
        arguments = [self._expression(a) for a in bound.args]
        arguments += [f"{name}={self._expression(a)}" for name, a in bound.kwargs.items()]
        return f"{self.namespace.add('k', bound.function)}({', '.join(arguments)})"

    def _expression(self, thing: Any) -> str:
        if isinstance(thing, Ref):
            return f"v{thing.value}"
        if isinstance(thing, OpaqueResult):
            return f"{self._opaque_results()}[{thing.number}]"
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

    def _opaque_results(self) -> str:
        """Return the name of the dict of opaque results, by number. It belongs to the program, as its addresses do."""
        self.namespace.names.setdefault("opaque_results", {})
        return "opaque_results"

    def _constant(self, thing: Any) -> str:
        return self.namespace.add("c", thing)

    def _dispatch_contexts(self) -> str:
        """Return contexts that skip autograd, views and version counters, and autocast if it was traced already."""
        contexts: list[type] = [torch._C._AutoDispatchBelowADInplaceOrView]
        contexts += [torch._C._DisableAutocast] if self.layout.autocast else []
        return ", ".join(f"{self.namespace.add('k', context)}()" for context in contexts)


def _indented(header: str, body: Iterable[str]) -> list[str]:
    return [header, *(f"    {line}" for line in body)]


def _same_elements(one: Value, two: Value) -> bool:
    """Return whether both are contiguous and start at the same place."""
    return (
        one.offset == two.offset
        and one.is_contiguous
        and two.is_contiguous
        and math.prod(one.shape) == math.prod(two.shape) > 0
    )


def _copies_onto_itself(graph: Graph, bound: BoundOp) -> bool:
    """Return whether an op copies a value onto itself, because the result took the bytes of the source in place."""
    if bound.function is not torch.ops.aten.copy_.default._op:
        return False
    one, two = (graph.values[ref] for ref in refs(bound.args))
    return one.storage == two.storage and same_layout(one, two)


def _adopt(result: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    planned = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
    return planned.copy_(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Says which values are static (globals), and the base (value index) of every dynamic storage (by index).

    `fresh_storages`: the storages that ops allocate; the caller will own them, but for those in `released`, activations
    outside the arena, which are released after their last use. `locked`: makes results on the host, of a shape, strides
    and type, where an accelerator copies them there; else None.
    """

    graph: Graph
    static: frozenset[int]
    base_of: Mapping[int, int]
    fresh_storages: frozenset[int]
    released: frozenset[int]
    autocast: bool
    locked: Callable[..., torch.Tensor] | None

    def base(self, index: int) -> int:
        """Return the value that spans the storage of a dynamic value."""
        return self.base_of[self.graph.values[index].storage]


@dataclass(frozen=True, slots=True)
class Line:
    """Lines of source, the values that exist after them, and those that must exist before."""

    source: tuple[str, ...]
    makes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()


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
