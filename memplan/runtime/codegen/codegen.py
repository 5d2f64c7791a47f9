"""Code generation: a bound step as straight-line Python, so that nothing is decided while it runs.

Tensors in the arena, parameters and constants are globals of the generated code: their addresses never
change, and all view ops are gone. Tensors whose address changes from call to call (inputs, outputs,
gradients, tangents) are locals, and so are views of them. Ops that torch's own interpreter can run are one line
together (`torchscript_runs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from memplan.core.graph import Graph, Value
from memplan.runtime.codegen.namespace import Namespace
from memplan.runtime.codegen.step_ir import Call, Empty, Hooked, Layout, Line, View, refs, same_layout
from memplan.runtime.codegen.torchscript_runs import interpreted, raise_as_eager, takes, told_apart
from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm
from memplan.runtime.memory.arena import dtype_of, view_within
from memplan.trace.traced import Live, OpaqueResult, Ref

Hook = Callable[[], None]
_WORTH = 3  # calls: fewer are made from Python in less time than it takes to enter torch's interpreter


class FunctionWriter:
    """Writes one function: dynamic values come in as arguments, ops follow, values go out."""

    def __init__(self, name: str, layout: Layout, namespace: Namespace, arguments: Sequence[int]) -> None:
        self.name = name
        self.layout = layout
        self.namespace = namespace
        self.arguments = arguments
        self.known = set(arguments)
        self.views: list[View] = []  # of arguments: they come first
        self.lines: list[Line] = []
        self.live: dict[str, str] = {}  # hyperparameters, read once per call
        self.indexed = False  # as `told_apart` says it of the lines

    def op(self, bound: BoundOp) -> None:
        """Call one op; its results land where their values live."""
        if _copies_onto_itself(self.layout.graph, bound):
            return
        unborn = self._unborn(bound) if bound.returns else None
        for value in refs((bound.args, bound.kwargs)):
            if value != unborn:
                self._use(value)
        if unborn is not None:
            self._add(Call(bound=bound, fresh=True, born=((0, unborn),)))
        elif bound.form is not CallForm.FUNCTIONAL:
            self._add(Call(bound=bound))
        else:
            self._land(bound)

    def _unborn(self, bound: BoundOp) -> int | None:
        """The result, if it is the caller's and this op is the first that writes it."""
        out = bound.outs[0]
        if out is None or out in self.layout.static or out in self.known:
            return None
        return out if self.layout.base(out) == out else None

    def _land(self, bound: BoundOp) -> None:
        """Copy fresh results to their place, or make them the caller's where they have none."""
        born: list[tuple[int, int]] = []
        adopted: list[tuple[int, int]] = []
        copied: list[tuple[int, int]] = []
        for position, out in enumerate(bound.outs):
            if out is None:
                continue
            if out in self.layout.static or out in self.known or self.layout.base(out) != out:
                self._use(out)
                copied.append((position, out))
            else:
                (born if position in bound.as_planned else adopted).append((position, out))
        self._add(Call(bound=bound, born=tuple(born), adopted=tuple(adopted), copied=tuple(copied)))

    def hook(self, function: Hook) -> None:
        """Call `function()` here (guards)."""
        self._add(Hooked(name=self.namespace.add("g", function)))

    def finish(self, groups: Sequence[Sequence[int]]) -> Callable[..., Any]:
        """Return a tuple of values per group, and compile."""
        for group in groups:
            for value in group:
                self._use(value)
        fitting, self.indexed = told_apart(self.lines, self._fitting())
        return self._compiled(self.name, groups, fitting)

    def _compiled(self, name: str, groups: Sequence[Sequence[int]], fitting: Sequence[bool]) -> Callable[..., Any]:
        parts = ["(" + "".join(f"{self._leaving(value)}, " for value in group) + ")" for group in groups]
        lines, native = self._written({value for group in groups for value in group}, fitting)
        body = [f"{name} = {source}" for source, name in self.live.items()] + lines
        body = _within(f"with {self._guards()}:", body or ["pass"])
        arguments = ", ".join(f"v{a}" for a in self.arguments)
        if native:
            optimise = self.namespace.add("k", torch._C._set_graph_executor_optimize)
            was = self.namespace.add("k", torch._C._get_graph_executor_optimize)
            body = [f"was = {was}()", f"{optimise}(False)", *_within("try:", body)]
            fail = self.namespace.add("k", partial(raise_as_eager, indexed=self.indexed))
            body += _within("except RuntimeError as error:", [f"{fail}(error)", "raise"])
            body += _within("finally:", [f"{optimise}(was)"])
            modes = self.namespace.add("k", torch._C._len_torch_dispatch_stack)
            python = self.namespace.add("k", _Python(self, f"{name}_in_python", groups))
            body = [*_within(f"if {modes}():", [f"return {python}({arguments})"]), *body]
        body.append(f"return {', '.join(parts) if parts else '()'}")
        return self.namespace.define("\n".join(_within(f"def {name}({arguments}):", body)), name)

    def _leaving(self, index: int) -> str:
        """A value for the caller: what stays in the arena leaves as another tensor over the same bytes."""
        if index not in self.layout.static:
            return f"v{index}"
        return f"{self.namespace.add('k', torch.Tensor.detach)}(v{index})"

    # -- values ------------------------------------------------------------------------------------------

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.known.update(line.makes)

    def _use(self, index: int) -> None:
        """Make sure that a dynamic value exists as a local: allocate its base, take a view of that."""
        if index in self.layout.static or index in self.known:
            return
        base = self.layout.base(index)
        if base not in self.known:
            fresh = self.layout.graph.values[index].storage in self.layout.fresh_storages
            assert fresh, f"value {index} is neither given nor the caller's"
            self._add(Empty(value=base))
        if index != base:
            view = View(base=base, value=index)
            if base in self.arguments:
                self.views.append(view)
                self.known.add(index)
            else:
                self._add(view)

    # -- lines -------------------------------------------------------------------------------------------

    def _written(self, returned: set[int], fitting: Sequence[bool]) -> tuple[list[str], bool]:
        """The lines as source, and whether torch's interpreter runs any of them; `fitting`: which it may."""
        written = [source for view in self.views for source in self._python(view)]
        last_use = {value: i for i, line in enumerate(self.lines) for value in line.uses}
        last_use |= dict.fromkeys(returned, len(self.lines))
        native = False
        end = 0
        for fit, group in groupby(zip(fitting, self.lines, strict=True), key=itemgetter(0)):
            run = [line for _, line in group]
            end += len(run)
            if fit and sum(isinstance(line, Call) for line in run) >= _WORTH:
                native = True
                results = [v for line in run for v in line.makes if last_use.get(v, -1) >= end]
                written.append(self._interpreted(run, results))
            else:
                written += [source for line in run for source in self._python(line)]
        return written, native

    def _fitting(self) -> list[bool]:
        """Which lines torch's interpreter takes, as far as so many stand together that it matters."""
        found: list[bool] = []
        asked: dict[Any, bool] = {}
        for hooked, group in groupby(self.lines, key=lambda line: isinstance(line, Hooked)):
            lines = list(group)
            may = self.layout.native and not hooked and sum(isinstance(line, Call) for line in lines) >= _WORTH
            found += [may and takes(line, self.layout, asked) for line in lines]
        return found

    def _interpreted(self, lines: Sequence[Line], results: Sequence[int]) -> str:
        """One call for all lines, out of which these values come."""
        run = interpreted(lines, results, self.layout, self.namespace.names)
        tensors = self.namespace.following(run.tensors, run.values)
        arguments = [tensors, *(f"v{value}" for value in run.arguments)]
        call = f"{self.namespace.add('s', run.function)}({', '.join(arguments)})"
        return f"{', '.join(f'v{value}' for value in results)} = {call}" if results else call

    def _python(self, line: Line) -> list[str]:
        if isinstance(line, Hooked):
            return [f"{line.name}()"]
        if isinstance(line, Empty):
            return [f"v{line.value} = {self._empty(self.layout.graph.values[line.value])}"]
        if isinstance(line, View):
            return [f"v{line.value} = {self._view(line.base, line.value)}"]
        return self._called(line)

    def _called(self, line: Call) -> list[str]:
        """A call, and what becomes of its results."""
        bound, call = line.bound, self._call(line)
        if bound.form is not CallForm.FUNCTIONAL:
            return [f"v{line.born[0][1]} = {call}" if line.born else call]
        if not bound.several and line.copied and line.copied[0][1] in self.layout.static:
            return [f"v{line.copied[0][1]}.copy_({call})"]
        names = [f"r{i}" for i in range(len(bound.outs))]
        lines = [f"{''.join(f'{n}, ' for n in names) if bound.several else names[0]} = {call}"]
        lines += [f"{self._hands()}[{number}] = {names[position]}" for position, number in bound.opaque_results]
        lines += [f"v{value} = {self._adopted(value, names[i])}" for i, value in (*line.born, *line.adopted)]
        lines += [f"v{value}.copy_({names[i]})" for i, value in line.copied]
        return [*lines, "del " + ", ".join(names)]

    def _empty(self, value: Value) -> str:
        empty = self.namespace.add("k", torch.empty_strided)
        device = torch.device(self.layout.graph.storages[value.storage].device)
        how = f"dtype={self._constant(dtype_of(value))}, device={self._constant(device)}"
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
        """A fresh result as the caller's tensor itself, when it is laid out as planned."""
        v = self.layout.graph.values[index]
        return f"{self.namespace.add('k', _adopt)}({result}, {v.shape!r}, {v.strides!r})"

    # -- expressions -------------------------------------------------------------------------------------

    def _call(self, line: Call) -> str:
        args, kwargs = line.arguments
        arguments = [self._expression(a) for a in args]
        arguments += [f"{name}={self._expression(a)}" for name, a in kwargs.items()]
        return f"{self.namespace.add('k', line.bound.function)}({', '.join(arguments)})"

    def _expression(self, thing: Any) -> str:
        if isinstance(thing, Ref):
            return f"v{thing.value}"
        if isinstance(thing, OpaqueResult):
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


class _Python:
    """A function without runs, made when it is first called: while a `TorchDispatchMode` is active, whose own errors
    come out of Python alone (out of torch's interpreter, they are no more than a `RuntimeError`)."""

    def __init__(self, writer: FunctionWriter, name: str, groups: Sequence[Sequence[int]]) -> None:
        self._make = partial(writer._compiled, name, groups, [False] * len(writer.lines))
        self._made: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made(*arguments)


def _within(header: str, body: Iterable[str]) -> list[str]:
    return [header, *(f"    {line}" for line in body)]


def _same_elements(one: Value, two: Value) -> bool:
    """Whether both are contiguous and start at the same place."""
    return (
        one.offset == two.offset
        and all(v.strides == tuple(math.prod(v.shape[i + 1 :]) for i in range(len(v.shape))) for v in (one, two))
        and math.prod(one.shape) == math.prod(two.shape) > 0
    )


def _copies_onto_itself(graph: Graph, bound: BoundOp) -> bool:
    """A copy whose source gave its bytes to the result (see `memplan.core.in_place`)."""
    if bound.function is not torch.Tensor.copy_:
        return False
    one, two = (graph.values[ref] for ref in refs(bound.args))
    return one.storage == two.storage and same_layout(one, two)


def _adopt(result: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    if result.stride() == strides:
        return result
    planned = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
    return planned.copy_(result)
