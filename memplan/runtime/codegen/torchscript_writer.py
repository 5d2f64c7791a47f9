"""Writes runs of ops as graphs of TorchScript.

Tensors in the arena are constants of the graph. Parameters and other tensors that may move are in one list, its first
input; tensors that change from call to call are the other inputs; tensors that the caller will own are made in the
graph and returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload

from memplan.runtime.codegen.step_ir import Call, Empty, Layout, Line, View, same_layout
from memplan.runtime.memory.arena import dtype_of
from memplan.trace.passes.out_variants import out_names
from memplan.trace.traced import Ref

_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
TENSOR, _INT = torch._C.TensorType.get(), torch._C.IntType.get()
_PLAIN = {"IntType": int, "BoolType": bool, "FloatType": float}


class TorchScriptWriter:
    """Writes a TorchScript graph.

    Its first input is the list of static tensors (`static`: values, and tensors that are no values); the others are
    `arguments`, dynamic values that the run does not make itself. `placed` values become constants.
    """

    def __init__(self, run: Sequence[Line], layout: Layout, placed: Mapping[int, torch.Tensor]) -> None:
        self.layout = layout
        made = {value for line in run for value in line.makes}
        used = dict.fromkeys(value for line in run for value in line.uses)
        leaves = [leaf for line in run if isinstance(line, Call) for leaf in pytree.tree_leaves(line.arguments)]
        constants = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.static: list[Any] = [*(v for v in used if v in layout.static and v not in placed), *constants.values()]
        self.arguments = [v for v in used if v not in layout.static and v not in made]
        self.graph: Any = torch._C.Graph()
        tensors = self._input(torch._C.ListType(TENSOR))
        unpacked = self._insert("prim::ListUnpack", [tensors], [TENSOR] * len(self.static))
        elements = zip(self.static, unpacked.outputs(), strict=True)
        self.known: dict[int, Any] = {value: self._input(TENSOR) for value in self.arguments}
        self.known |= {id(thing) if isinstance(thing, torch.Tensor) else thing: node for thing, node in elements}
        self.known |= {value: self._constant(tensor) for value, tensor in placed.items()}

    def write(self, line: Line) -> None:
        """Add a line to the graph."""
        if isinstance(line, Empty):
            value = self.layout.graph.values[line.value]
            device = torch.device(self.layout.graph.storages[value.storage].device)
            given = (value.shape, value.strides, dtype_of(value), None, device, None)
            self.known[line.value] = self._op(torch.ops.aten.empty_strided.default, given).output()
        elif isinstance(line, View):
            self.known[line.value] = self._view(line)
        elif isinstance(line, Call):
            made = list(self.call(line).outputs())
            self.known |= {v: made[position] for position, v in line.born}
            for position, v in line.copied:
                copy = [self.known[v], made[position], self._constant(False)]
                self._insert("aten::copy_", copy, [TENSOR])

    def call(self, line: Call) -> Any:
        """Add a call to the graph; return its node."""
        overload, (args, kwargs) = overload_of(line), line.arguments
        assert overload is not None
        outs = [out for name in line.bound.out_names if name in kwargs for out in _as_list(kwargs.pop(name))]
        kwargs |= dict(zip(out_names(overload), outs, strict=True)) if outs else {}
        given = [
            args[i] if i < len(args) else kwargs.pop(a.name, a.default_value)
            for i, a in enumerate(overload._schema.arguments)
        ]
        if kwargs:
            raise TypeError(f"{overload} takes no {', '.join(kwargs)}")
        return self._op(overload, given)

    def returning(self, results: Sequence[int]) -> Any:
        """Return the graph after adding its outputs; all lines must be in it."""
        if not results:
            self.graph.registerOutput(self._constant(None))
        elif len(results) == 1:
            self.graph.registerOutput(self.known[results[0]])
        else:
            # a list, because converting a tuple to Python checks the type of every element
            kind = torch._C.ListType(TENSOR)
            results_list = self._insert("prim::ListConstruct", [self.known[v] for v in results], [kind])
            self.graph.registerOutput(results_list.output())
        return self.graph

    def _view(self, line: View) -> Any:
        one, two = (self.layout.graph.values[i] for i in (line.base, line.value))
        if same_layout(one, two):
            return self.known[line.base]
        given = (Ref(line.base), two.shape, two.strides, two.offset - one.offset)
        return self._op(torch.ops.aten.as_strided.default, given).output()

    # -- nodes -------------------------------------------------------------------------------------------

    def _input(self, kind: Any) -> Any:
        made = self.graph.addInput()
        made.setType(kind)
        return made

    def _constant(self, thing: Any) -> Any:
        return self.graph.insertConstant(thing)

    def _insert(self, name: str, inputs: Sequence[Any], kinds: Sequence[Any]) -> Any:
        node = self.graph.create(name, list(inputs), len(kinds))
        self.graph.insertNode(node)
        for output, kind in zip(node.outputs(), kinds, strict=True):
            output.setType(kind)
        return node

    def _op(self, overload: OpOverload, given: Sequence[Any]) -> Any:
        schema = overload._schema
        inputs = [self._given(thing, a.type) for thing, a in zip(given, schema.arguments, strict=True)]
        return self._insert(schema.name, inputs, [r.type for r in schema.returns])

    def _given(self, thing: Any, kind: Any) -> Any:
        """Return the node of an argument of type `kind`."""
        if isinstance(thing, Ref):
            return self.known[thing.value]
        if isinstance(thing, torch.Tensor):
            return self.known[id(thing)]
        while kind.kind() == "OptionalType":
            kind = kind.getElementType()
        if isinstance(thing, (list, tuple)):
            element = _INT if kind.getElementType().kind() == "SymIntType" else kind.getElementType()
            plain = _PLAIN.get(element.kind())
            if thing and plain is not None and all(type(item) in {plain, int} for item in thing):
                return self._constant([plain(item) for item in thing])
            items = [self._given(item, element) for item in thing]
            return self._insert("prim::ListConstruct", items, [torch._C.ListType(element)]).output()
        if isinstance(thing, torch.memory_format):
            return self._constant(_MEMORY_FORMATS.index(thing))
        as_float = kind.kind() == "FloatType" and type(thing) is int
        return self._constant(float(thing) if as_float else thing)


def overload_of(line: Call) -> OpOverload | None:
    return line.bound.fresh_overload if line.fresh else line.bound.overload


def _as_list(thing: Any) -> Sequence[Any]:
    return thing if isinstance(thing, (list, tuple)) else [thing]
